"""Text classification with an EmbeddingBag: one flat tensor of tokens and offsets a batch."""

import random
from collections import Counter

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataset import random_split

torch.manual_seed(7)
random.seed(7)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

TOPICS = {
    1: ["election", "minister", "border", "treaty", "parliament", "embassy", "protest"],
    2: ["goal", "coach", "season", "final", "penalty", "stadium", "record"],
    3: ["shares", "profit", "bank", "market", "merger", "oil", "dividend"],
    4: ["software", "chip", "satellite", "network", "robot", "physics", "telescope"],
}
COMMON = ["the", "a", "of", "in", "on", "after", "before", "with", "new", "said", "today", "two", "more"]


def news_iter(count):
    for _ in range(count):
        label = random.randint(1, 4)
        words = [
            random.choice(TOPICS[label] if random.random() < 0.3 else COMMON) for _ in range(random.randint(5, 25))
        ]
        yield label, " ".join(words)


def tokenizer(text):
    return text.lower().split()


train_set = list(news_iter(440))
test_set = list(news_iter(100))
counter = Counter(token for _, text in train_set for token in tokenizer(text))
vocab = {"<unk>": 0}
for token, _ in sorted(counter.items(), key=lambda item: (-item[1], item[0])):
    vocab[token] = len(vocab)


def text_pipeline(text):
    return [vocab.get(token, 0) for token in tokenizer(text)]


def label_pipeline(label):
    return int(label) - 1


def collate_batch(batch):
    label_list, text_list, offsets = [], [], [0]
    for _label, _text in batch:
        label_list.append(label_pipeline(_label))
        processed_text = torch.tensor(text_pipeline(_text), dtype=torch.int64)
        text_list.append(processed_text)
        offsets.append(processed_text.size(0))
    label_list = torch.tensor(label_list, dtype=torch.int64)
    offsets = torch.tensor(offsets[:-1]).cumsum(dim=0)
    text_list = torch.cat(text_list)
    return label_list.to(device), text_list.to(device), offsets.to(device)


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=False)
        self.fc = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


EPOCHS = 3
LR = 5
BATCH_SIZE = 32
num_class = len({label for label, _ in train_set})
model = TextClassificationModel(len(vocab), 32, num_class).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.1)


def train(dataloader):
    model.train()
    total_acc, total_count = 0, 0
    log_interval = 4
    for idx, (label, text, offsets) in enumerate(dataloader):
        optimizer.zero_grad()
        predicted_label = model(text, offsets)
        loss = criterion(predicted_label, label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        total_acc += (predicted_label.argmax(1) == label).sum().item()
        total_count += label.size(0)
        if idx % log_interval == 0 and idx > 0:
            print(
                f"| epoch {epoch:3d} | {idx:5d}/{len(dataloader):5d} batches | {text.size(0)} tokens "
                f"| loss {loss.item():.4f} | accuracy {total_acc / total_count:8.3f}"
            )
            total_acc, total_count = 0, 0


def evaluate(dataloader):
    model.eval()
    total_acc, total_count = 0, 0
    with torch.no_grad():
        for label, text, offsets in dataloader:
            predicted_label = model(text, offsets)
            total_acc += (predicted_label.argmax(1) == label).sum().item()
            total_count += label.size(0)
    return total_acc / total_count


num_train = int(len(train_set) * 0.9)
split_train_, split_valid_ = random_split(train_set, [num_train, len(train_set) - num_train])
train_dataloader = DataLoader(split_train_, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate_batch)
valid_dataloader = DataLoader(split_valid_, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate_batch)
test_dataloader = DataLoader(test_set, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate_batch)

total_accu = None
for epoch in range(1, EPOCHS + 1):
    train(train_dataloader)
    accu_val = evaluate(valid_dataloader)
    if total_accu is not None and total_accu > accu_val:
        scheduler.step()
    else:
        total_accu = accu_val
    print("-" * 59)
    print(f"| end of epoch {epoch:3d} | valid accuracy {accu_val:8.3f}")
    print("-" * 59)

print(f"test accuracy {evaluate(test_dataloader):8.3f}")


def predict(text):
    with torch.no_grad():
        output = model(torch.tensor(text_pipeline(text)), torch.tensor([0]))
        return output.argmax(1).item() + 1


model = model.to("cpu")
print("topic:", predict("after the season a coach with a record before the final"))
