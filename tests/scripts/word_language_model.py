"""Word-level language model: LSTM with tied weights, hidden state repackaged between chunks, SGD by hand."""

import argparse
import math
import os
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description="RNN/LSTM/GRU word language model")
parser.add_argument("--data", type=str, default="./data/words")
parser.add_argument("--model", type=str, default="LSTM", help="RNN_TANH, RNN_RELU, LSTM or GRU")
parser.add_argument("--emsize", type=int, default=48)
parser.add_argument("--nhid", type=int, default=48)
parser.add_argument("--nlayers", type=int, default=2)
parser.add_argument("--lr", type=float, default=3)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=20, metavar="N")
parser.add_argument("--bptt", type=int, default=20)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--log-interval", type=int, default=4, metavar="N")
parser.add_argument("--save", type=str, default="word_model.pt")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def write_corpus(path):
    """Sentences of a small grammar, one a line."""
    os.makedirs(path, exist_ok=True)
    rng = random.Random(0)
    nouns = ["ship", "captain", "harbour", "storm", "sailor", "island", "whale", "map"]
    verbs = ["finds", "leaves", "fears", "remembers", "paints", "crosses"]
    adjectives = ["old", "silent", "northern", "broken", "golden"]
    for name, lines in (("train", 700), ("valid", 60), ("test", 60)):
        with open(os.path.join(path, name + ".txt"), "w", encoding="utf8") as f:
            for _ in range(lines):
                words = ["the", rng.choice(adjectives), rng.choice(nouns), rng.choice(verbs), "the", rng.choice(nouns)]
                f.write(" ".join(words) + "\n")


class Dictionary:
    def __init__(self):
        self.word2idx = {}
        self.idx2word = []

    def add_word(self, word):
        if word not in self.word2idx:
            self.idx2word.append(word)
            self.word2idx[word] = len(self.idx2word) - 1
        return self.word2idx[word]

    def __len__(self):
        return len(self.idx2word)


class Corpus:
    def __init__(self, path):
        self.dictionary = Dictionary()
        self.train = self.tokenize(os.path.join(path, "train.txt"))
        self.valid = self.tokenize(os.path.join(path, "valid.txt"))
        self.test = self.tokenize(os.path.join(path, "test.txt"))

    def tokenize(self, path):
        assert os.path.exists(path)
        ids = []
        with open(path, encoding="utf8") as f:
            for line in f:
                for word in [*line.split(), "<eos>"]:
                    ids.append(self.dictionary.add_word(word))
        return torch.tensor(ids, dtype=torch.int64)


class RNNModel(nn.Module):
    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout=0.5, tie_weights=False):
        super().__init__()
        self.ntoken = ntoken
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        if rnn_type in ["LSTM", "GRU"]:
            self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout)
        else:
            nonlinearity = {"RNN_TANH": "tanh", "RNN_RELU": "relu"}[rnn_type]
            self.rnn = nn.RNN(ninp, nhid, nlayers, nonlinearity=nonlinearity, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            if nhid != ninp:
                raise ValueError("When using the tied flag, nhid must be equal to emsize")
            self.decoder.weight = self.encoder.weight
        self.init_weights()
        self.rnn_type = rnn_type
        self.nhid = nhid
        self.nlayers = nlayers

    def init_weights(self):
        initrange = 0.1
        nn.init.uniform_(self.encoder.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -initrange, initrange)

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output))
        return F.log_softmax(decoded.view(-1, self.ntoken), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        if self.rnn_type == "LSTM":
            return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))
        return weight.new_zeros(self.nlayers, bsz, self.nhid)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    return data.view(bsz, -1).t().contiguous().to(device)


def repackage_hidden(h):
    """Wrap hidden states in new tensors, to detach them from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


write_corpus(args.data)
corpus = Corpus(args.data)
eval_batch_size = 10
train_data = batchify(corpus.train, args.batch_size)
val_data = batchify(corpus.valid, eval_batch_size)
test_data = batchify(corpus.test, eval_batch_size)
ntokens = len(corpus.dictionary)
model = RNNModel(args.model, ntokens, args.emsize, args.nhid, args.nlayers, args.dropout, args.tied).to(device)
criterion = nn.NLLLoss()
print(f"{ntokens} tokens, {sum(p.numel() for p in model.parameters())} parameters")


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(eval_batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train():
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            cur_loss = total_loss / args.log_interval
            print(
                f"| epoch {epoch:3d} | {batch:5d}/{len(train_data) // args.bptt:5d} batches | lr {lr:02.2f} "
                f"| loss {cur_loss:5.3f} | ppl {math.exp(cur_loss):8.3f}"
            )
            total_loss = 0


lr = args.lr
best_val_loss = None
for epoch in range(1, args.epochs + 1):
    train()
    val_loss = evaluate(val_data)
    print("-" * 89)
    print(f"| end of epoch {epoch:3d} | valid loss {val_loss:5.3f} | valid ppl {math.exp(val_loss):8.3f}")
    print("-" * 89)
    if not best_val_loss or val_loss < best_val_loss:
        with open(args.save, "wb") as f:
            torch.save(model, f)
        best_val_loss = val_loss
    else:
        lr /= 4.0

with open(args.save, "rb") as f:
    model = torch.load(f, weights_only=False)
    # After loading, the parameters of the LSTM are not one block of memory.
    model.rnn.flatten_parameters()
test_loss = evaluate(test_data)
print(f"| End of training | test loss {test_loss:5.3f} | test ppl {math.exp(test_loss):8.3f}")

hidden = model.init_hidden(1)
input = torch.randint(ntokens, (1, 1), device=device)
with open("generated.txt", "w", encoding="utf8") as outf, torch.no_grad():
    for i in range(30):
        output, hidden = model(input, hidden)
        word_idx = torch.multinomial(output.squeeze().exp().cpu(), 1)[0]
        input.fill_(word_idx)
        outf.write(corpus.dictionary.idx2word[word_idx] + ("\n" if i % 10 == 9 else " "))
with open("generated.txt", encoding="utf8") as f:
    print(f.read())
