"""DistilBERT in a loop of its own: padding by hand, parameter groups, linear schedule with warm-up, best epoch kept."""

import copy
import random

import numpy as np
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from transformers import DistilBertConfig, DistilBertForSequenceClassification, get_linear_schedule_with_warmup

SEED = 17
VOCABULARY = 80
CLASSES = 3


def set_seeds(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Sentences(Dataset):
    """Sentences of changing length in which words of one class are more frequent."""

    def __init__(self, count):
        self.examples = []
        for _ in range(count):
            label = random.randrange(CLASSES)
            length = random.randint(6, 24)
            words = [random.randrange(2, VOCABULARY) for _ in range(length)]
            for position in random.sample(range(length), length // 3):
                words[position] = 2 + label * 10 + random.randrange(10)
            self.examples.append((words, label))

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def pad(batch):
    longest = max(len(words) for words, _ in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, (words, _) in enumerate(batch):
        tokens[row, : len(words)] = torch.tensor(words)
        mask[row, : len(words)] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([label for _, label in batch])}


def evaluate(model, loader, device):
    model.eval()
    losses = []
    predictions = []
    truth = []
    for batch in loader:
        batch = {name: value.to(device) for name, value in batch.items()}
        with torch.no_grad():
            output = model(**batch)
        losses.append(output.loss.item())
        predictions.append(output.logits.detach().cpu().numpy())
        truth.append(batch["labels"].cpu().numpy())
    accuracy = (np.concatenate(predictions).argmax(axis=1) == np.concatenate(truth)).mean()
    return sum(losses) / len(losses), accuracy


def main():
    set_seeds(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set = Sentences(180)
    val_set = Sentences(50)
    train = DataLoader(train_set, sampler=RandomSampler(train_set), batch_size=20, collate_fn=pad)
    val = DataLoader(val_set, sampler=SequentialSampler(val_set), batch_size=25, collate_fn=pad)

    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=64,
        n_layers=2,
        n_heads=4,
        hidden_dim=128,
        max_position_embeddings=32,
        num_labels=CLASSES,
    )
    model = DistilBertForSequenceClassification(config).to(device)
    no_decay = ("bias", "layer_norm.weight", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if not name.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for name, p in named if name.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=2e-3, eps=1e-8)
    epochs = 3
    total = len(train) * epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=total // 10, num_training_steps=total)

    best = (0.0, None)
    for epoch in range(epochs):
        model.train()
        running = 0.0
        for step, batch in enumerate(train):
            batch = {name: value.to(device) for name, value in batch.items()}
            model.zero_grad()
            loss = model(**batch).loss
            running += loss.item()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if step % 3 == 0:
                rate = scheduler.get_last_lr()[0]
                print(f"epoch {epoch} step {step}: loss {loss.item():.4f} norm {norm.item():.4f} rate {rate:.6f}")
        val_loss, accuracy = evaluate(model, val, device)
        print(f"epoch {epoch}: train {running / len(train):.4f} val {val_loss:.4f} accuracy {accuracy:.4f}")
        if accuracy > best[0]:
            best = (accuracy, copy.deepcopy(model.state_dict()))
    model.load_state_dict(best[1])
    print(f"best {evaluate(model, val, device)[1]:.4f}")


if __name__ == "__main__":
    main()
