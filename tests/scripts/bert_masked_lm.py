"""BERT from scratch: masked language model and order of sentences, warm-up, decay of the learning rate."""

import logging
import random
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

logging.basicConfig(format="%(levelname)s - %(message)s", level=logging.INFO, stream=sys.stdout)
logger = logging.getLogger(__name__)

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIAL = 4
VOCAB = 20
MAX_LEN = 24


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class PairDataset(Dataset):
    """Pairs of sentences; the second continues the first by counting on, or is a random one."""

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.examples = []
        for _ in range(count):
            start, length = rng.integers(0, VOCAB - SPECIAL), rng.integers(4, 10)
            first = (start + np.arange(length)) % (VOCAB - SPECIAL)
            is_next = int(rng.random() < 0.5)
            begin = first[-1] + 1 if is_next else rng.integers(0, VOCAB - SPECIAL)
            second = (begin + np.arange(rng.integers(4, 10))) % (VOCAB - SPECIAL)
            self.examples.append(((first + SPECIAL).tolist(), (second + SPECIAL).tolist(), is_next))

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, item):
        first, second, is_next = self.examples[item]
        tokens = [CLS, *first, SEP, *second, SEP]
        segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        padding = MAX_LEN - len(tokens)
        return {
            "input_ids": torch.tensor(tokens + [PAD] * padding),
            "segment_ids": torch.tensor(segments + [0] * padding),
            "is_next": torch.tensor(is_next),
        }


def mask_tokens(inputs, mlm_probability=0.15):
    """Prepare masked tokens: 80% mask, 10% random, 10% original."""
    labels = inputs.clone()
    probability_matrix = torch.full(labels.shape, mlm_probability)
    probability_matrix.masked_fill_(inputs < SPECIAL, value=0.0)
    masked_indices = torch.bernoulli(probability_matrix).bool()
    labels[~masked_indices] = -100
    indices_replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & masked_indices
    inputs = inputs.masked_fill(indices_replaced, MASK)
    indices_random = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & masked_indices & ~indices_replaced
    random_words = torch.randint(SPECIAL, VOCAB, labels.shape)
    inputs[indices_random] = random_words[indices_random]
    return inputs, labels


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden, eps=1e-12)
        self.intermediate = nn.Linear(hidden, 4 * hidden)
        self.output = nn.Linear(4 * hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden, eps=1e-12)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x, mask):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5 + mask
        probs = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        context = (probs @ v).transpose(1, 2).reshape(x.shape)
        x = self.norm1(x + F.dropout(self.dense(context), self.dropout, self.training))
        return self.norm2(x + F.dropout(self.output(F.gelu(self.intermediate(x))), self.dropout, self.training))


class BertForPreTraining(nn.Module):
    def __init__(self, hidden=48, layers=2, heads=4, dropout=0.1):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, hidden, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(MAX_LEN, hidden)
        self.token_type_embeddings = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(hidden, heads, dropout) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.seq_relationship = nn.Linear(hidden, 2)
        self.transform = nn.Linear(hidden, hidden)
        self.transform_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.register_buffer("position_ids", torch.arange(MAX_LEN).expand((1, -1)))
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.05)

    def forward(self, input_ids, segment_ids, labels=None, is_next=None):
        attention_mask = (input_ids != PAD)[:, None, None, :]
        mask = torch.zeros(attention_mask.shape, device=input_ids.device).masked_fill(~attention_mask, -10000.0)
        x = self.word_embeddings(input_ids) + self.position_embeddings(self.position_ids[:, : input_ids.size(1)])
        x = self.dropout(self.norm(x + self.token_type_embeddings(segment_ids)))
        for layer in self.layers:
            x = layer(x, mask)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        relation = self.seq_relationship(pooled)
        scores = F.linear(self.transform_norm(F.gelu(self.transform(x))), self.word_embeddings.weight, self.bias)
        if labels is None:
            return scores, relation
        masked_lm_loss = F.cross_entropy(scores.view(-1, VOCAB), labels.view(-1), ignore_index=-100)
        next_sentence_loss = F.cross_entropy(relation, is_next)
        return masked_lm_loss + next_sentence_loss, masked_lm_loss, relation


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, lr_lambda)


def main():
    set_seed(42)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_dataset = PairDataset(250, 0)
    eval_dataset = PairDataset(60, 1)
    train_loader = DataLoader(train_dataset, batch_size=32, shuffle=True)
    eval_loader = DataLoader(eval_dataset, batch_size=32)
    epochs = 3
    model = BertForPreTraining().to(device)
    no_decay = ["bias", "norm"]
    grouped = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    total_steps = epochs * len(train_loader)
    optimizer = torch.optim.AdamW(grouped, lr=5e-3, eps=1e-8)
    scheduler = get_linear_schedule_with_warmup(optimizer, total_steps // 10, total_steps)
    logger.info("***** Running training *****")
    logger.info("  Num examples = %d", len(train_dataset))
    logger.info("  Total optimization steps = %d", total_steps)

    global_step = 0
    for epoch in range(epochs):
        model.train()
        correct, seen = 0, 0
        for batch in tqdm(train_loader, desc=f"Epoch {epoch}"):
            input_ids, labels = mask_tokens(batch["input_ids"])
            loss, lm_loss, relation = model(
                input_ids.to(device), batch["segment_ids"].to(device), labels.to(device), batch["is_next"].to(device)
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            global_step += 1
            correct += relation.argmax(dim=-1).eq(batch["is_next"].to(device)).sum().item()
            seen += relation.size(0)
            if global_step % 4 == 0:
                logger.info(
                    "step %d loss %.4f mlm %.4f lr %.2e",
                    global_step,
                    loss.item(),
                    lm_loss.item(),
                    scheduler.get_last_lr()[0],
                )
        model.eval()
        losses = []
        with torch.no_grad():
            for batch in eval_loader:
                input_ids, labels = mask_tokens(batch["input_ids"])
                outputs = model(
                    input_ids.to(device),
                    batch["segment_ids"].to(device),
                    labels.to(device),
                    batch["is_next"].to(device),
                )
                losses.append(outputs[1].repeat(len(input_ids)))
        perplexity = torch.exp(torch.cat(losses).mean())
        logger.info("epoch %d: order accuracy %.3f, perplexity %.3f", epoch, correct / seen, perplexity)
    torch.save({"model": model.state_dict(), "step": global_step}, "bert.pt")


if __name__ == "__main__":
    main()
