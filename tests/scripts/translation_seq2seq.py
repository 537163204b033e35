"""Translation by an encoder and a decoder with attention: teacher forcing drawn by `random`, batches padded."""

import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.utils.rnn import pad_sequence

SEED = 1234
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)
torch.cuda.manual_seed(SEED)
torch.backends.cudnn.deterministic = True
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

PAD_TOKEN, SOS_TOKEN, EOS_TOKEN = 0, 1, 2


class Lang:
    def __init__(self, name):
        self.name = name
        self.word2index = {"<pad>": PAD_TOKEN, "<sos>": SOS_TOKEN, "<eos>": EOS_TOKEN}
        self.index2word = {index: word for word, index in self.word2index.items()}

    def add_sentence(self, sentence):
        for word in sentence.split(" "):
            if word not in self.word2index:
                self.index2word[len(self.word2index)] = word
                self.word2index[word] = len(self.word2index)

    def indexes(self, sentence):
        return [SOS_TOKEN, *(self.word2index[word] for word in sentence.split(" ")), EOS_TOKEN]


def make_pairs(count):
    """Numbers in words and in a made-up language that puts the ones before the tens."""
    ones = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    tens = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    pairs = []
    for _ in range(count):
        hundreds, ten, one = random.randrange(10), random.randrange(2, 10), random.randrange(10)
        source = [ones[hundreds], "hundred"] if hundreds else []
        source += [tens[ten]] + ([ones[one]] if one else [])
        target = [f"{ones[hundreds][::-1]}", "cent"] if hundreds else []
        target += ([ones[one][::-1], "und"] if one else []) + [tens[ten][::-1]]
        pairs.append((" ".join(source), " ".join(target)))
    return pairs


pairs = make_pairs(420)
english, other = Lang("english"), Lang("other")
for source, target in pairs:
    english.add_sentence(source)
    other.add_sentence(target)
train_pairs, valid_pairs = pairs[:370], pairs[370:]
print(f"Counted words: {english.name} {len(english.word2index)}, {other.name} {len(other.word2index)}")
print(random.choice(train_pairs))


def batches(pairs, batch_size, shuffle):
    order = list(range(len(pairs)))
    if shuffle:
        random.shuffle(order)
    for start in range(0, len(order), batch_size):
        rows = [pairs[i] for i in order[start : start + batch_size]]
        src = pad_sequence([torch.tensor(english.indexes(a)) for a, _ in rows], padding_value=PAD_TOKEN)
        trg = pad_sequence([torch.tensor(other.indexes(b)) for _, b in rows], padding_value=PAD_TOKEN)
        yield src.to(device), trg.to(device)


class Encoder(nn.Module):
    def __init__(self, input_dim, emb_dim, hid_dim, dropout):
        super().__init__()
        self.embedding = nn.Embedding(input_dim, emb_dim)
        self.rnn = nn.GRU(emb_dim, hid_dim, bidirectional=True)
        self.fc = nn.Linear(hid_dim * 2, hid_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src):
        outputs, hidden = self.rnn(self.dropout(self.embedding(src)))
        hidden = torch.tanh(self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1)))
        return outputs, hidden


class Attention(nn.Module):
    def __init__(self, hid_dim):
        super().__init__()
        self.attn = nn.Linear(hid_dim * 3, hid_dim)
        self.v = nn.Linear(hid_dim, 1, bias=False)

    def forward(self, hidden, encoder_outputs, mask):
        src_len = encoder_outputs.shape[0]
        hidden = hidden.unsqueeze(1).repeat(1, src_len, 1)
        encoder_outputs = encoder_outputs.permute(1, 0, 2)
        energy = torch.tanh(self.attn(torch.cat((hidden, encoder_outputs), dim=2)))
        attention = self.v(energy).squeeze(2).masked_fill(mask == 0, -1e10)
        return F.softmax(attention, dim=1)


class Decoder(nn.Module):
    def __init__(self, output_dim, emb_dim, hid_dim, dropout, attention):
        super().__init__()
        self.output_dim = output_dim
        self.attention = attention
        self.embedding = nn.Embedding(output_dim, emb_dim)
        self.rnn = nn.GRU(hid_dim * 2 + emb_dim, hid_dim)
        self.fc_out = nn.Linear(hid_dim * 3 + emb_dim, output_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input, hidden, encoder_outputs, mask):
        embedded = self.dropout(self.embedding(input.unsqueeze(0)))
        a = self.attention(hidden, encoder_outputs, mask).unsqueeze(1)
        weighted = torch.bmm(a, encoder_outputs.permute(1, 0, 2)).permute(1, 0, 2)
        output, hidden = self.rnn(torch.cat((embedded, weighted), dim=2), hidden.unsqueeze(0))
        prediction = self.fc_out(torch.cat((output.squeeze(0), weighted.squeeze(0), embedded.squeeze(0)), dim=1))
        return prediction, hidden.squeeze(0)


class Seq2Seq(nn.Module):
    def __init__(self, encoder, decoder, device):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.device = device

    def create_mask(self, src):
        return (src != PAD_TOKEN).permute(1, 0)

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        trg_len, batch_size = trg.shape
        outputs = torch.zeros(trg_len, batch_size, self.decoder.output_dim).to(self.device)
        encoder_outputs, hidden = self.encoder(src)
        mask = self.create_mask(src)
        input = trg[0]
        for t in range(1, trg_len):
            output, hidden = self.decoder(input, hidden, encoder_outputs, mask)
            outputs[t] = output
            teacher_force = random.random() < teacher_forcing_ratio
            input = trg[t] if teacher_force else output.argmax(1)
        return outputs


def init_weights(m):
    for name, param in m.named_parameters():
        if "weight" in name:
            nn.init.normal_(param.data, mean=0, std=0.1)
        else:
            nn.init.constant_(param.data, 0)


def run_epoch(model, data, criterion, optimizer=None, clip=1.0):
    model.train(optimizer is not None)
    epoch_loss = 0
    steps = 0
    for src, trg in data:
        # The evaluation does without teacher forcing.
        output = model(src, trg) if optimizer else model(src, trg, 0)
        output = output[1:].view(-1, output.shape[-1])
        loss = criterion(output, trg[1:].reshape(-1))
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        epoch_loss += loss.item()
        steps += 1
        if optimizer and steps % 4 == 0:
            print(f"\tstep {steps}: loss {loss.item():.3f}, target of {trg.shape[0]} by {trg.shape[1]}")
    return epoch_loss / steps


@torch.no_grad()
def translate(model, sentence, max_len=10):
    model.eval()
    src = torch.tensor(english.indexes(sentence), device=device).unsqueeze(1)
    encoder_outputs, hidden = model.encoder(src)
    mask = model.create_mask(src)
    words = [SOS_TOKEN]
    for _ in range(max_len):
        output, hidden = model.decoder(torch.tensor(words[-1:], device=device), hidden, encoder_outputs, mask)
        words.append(output.argmax(1).item())
        if words[-1] == EOS_TOKEN:
            break
    return " ".join(other.index2word[i] for i in words[1:])


attn = Attention(48)
enc = Encoder(len(english.word2index), 32, 48, 0.2)
dec = Decoder(len(other.word2index), 32, 48, 0.2, attn)
model = Seq2Seq(enc, dec, device).to(device)
model.apply(init_weights)
print(f"The model has {sum(p.numel() for p in model.parameters() if p.requires_grad):,} trainable parameters")
optimizer = optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD_TOKEN)

best_valid_loss = float("inf")
for epoch in range(4):
    train_loss = run_epoch(model, batches(train_pairs, 48, True), criterion, optimizer)
    with torch.no_grad():
        valid_loss = run_epoch(model, batches(valid_pairs, 32, False), criterion)
    if valid_loss < best_valid_loss:
        best_valid_loss = valid_loss
        torch.save(model.state_dict(), "seq2seq.pt")
    print(f"Epoch: {epoch + 1:02}")
    print(f"\tTrain Loss: {train_loss:.3f} | Train PPL: {math.exp(train_loss):7.3f}")
    print(f"\t Val. Loss: {valid_loss:.3f} |  Val. PPL: {math.exp(valid_loss):7.3f}")

model.load_state_dict(torch.load("seq2seq.pt"))
for source, target in valid_pairs[:3]:
    print(f"> {source}\n= {target}\n< {translate(model, source)}")
