"""Character-level language model with an LSTM: sequence first, truncated backpropagation through time, sampling."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

seed = 1234
hidden_size = 64
num_layers = 2
seq_len = 25
batch_size = 22
num_epochs = 2
lr = 5e-3
max_norm = 1.0


def make_text(num_sentences=700):
    rng = random.Random(7)
    subjects = ["the cat", "a small dog", "my neighbour", "the old king", "every student"]
    verbs = ["sees", "likes", "follows", "paints", "forgets"]
    objects = ["the house", "a red bird", "the river", "his friends", "some bread"]
    return " ".join(f"{rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(objects)}." for _ in range(num_sentences))


class CharLSTM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers, dropout=0.1):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size, num_layers, dropout=dropout)
        self.decoder = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_seq, hidden_state):
        # input_seq: (seq_len, batch)
        output, hidden_state = self.lstm(self.embedding(input_seq), hidden_state)
        return self.decoder(output), (hidden_state[0].detach(), hidden_state[1].detach())

    def init_hidden(self, batch_size, device):
        shape = (self.num_layers, batch_size, self.hidden_size)
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)


def sample(model, char_to_ix, ix_to_char, device, prime="the ", length=80, temperature=0.8):
    model.eval()
    hidden = model.init_hidden(1, device)
    text = prime
    with torch.no_grad():
        for c in prime[:-1]:
            _, hidden = model(torch.tensor([[char_to_ix[c]]], device=device), hidden)
        x = torch.tensor([[char_to_ix[prime[-1]]]], device=device)
        for _ in range(length):
            output, hidden = model(x, hidden)
            probs = F.softmax(output.view(-1) / temperature, dim=0)
            index = torch.multinomial(probs, 1)
            text += ix_to_char[index.item()]
            x = index.view(1, 1)
    model.train()
    return text


random.seed(seed)
torch.manual_seed(seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

text = make_text()
chars = sorted(set(text))
char_to_ix = {ch: i for i, ch in enumerate(chars)}
ix_to_char = dict(enumerate(chars))
print(f"Data has {len(text)} characters, {len(chars)} unique")

data = torch.tensor([char_to_ix[ch] for ch in text], device=device)
num_steps = data.size(0) // batch_size
data = data[: num_steps * batch_size].view(batch_size, num_steps).t().contiguous()

model = CharLSTM(len(chars), hidden_size, num_layers).to(device)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=lr)

iteration = 0
for epoch in range(1, num_epochs + 1):
    hidden_state = model.init_hidden(batch_size, device)
    running_loss = 0.0
    n = 0
    offset = random.randint(0, 8)
    while offset + seq_len + 1 <= data.size(0) and n < 18:
        input_seq = data[offset : offset + seq_len]
        target_seq = data[offset + 1 : offset + seq_len + 1]
        output, hidden_state = model(input_seq, hidden_state)
        loss = loss_fn(output.view(-1, len(chars)), target_seq.reshape(-1))
        running_loss += loss.item()

        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()

        offset += seq_len
        n += 1
        iteration += 1
        if iteration % 6 == 0:
            print(f"iter {iteration:3d} loss {loss.item():.4f} grad norm {grad_norm:.3f}")
    print(f"Epoch: {epoch}\tLoss: {running_loss / n:.4f}")
    print("----\n" + sample(model, char_to_ix, ix_to_char, device) + "\n----")
    torch.save(model.state_dict(), "char_lstm.pth")
