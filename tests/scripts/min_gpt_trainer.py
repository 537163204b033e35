"""A GPT learns to sort digits: configuration nodes, a Trainer class with callbacks, evaluation by generation."""

import math
import os
import random
import sys
from collections import defaultdict

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


class CfgNode:
    """A lightweight configuration."""

    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)

    def to_dict(self):
        return {k: v.to_dict() if isinstance(v, CfgNode) else v for k, v in self.__dict__.items()}

    def merge_from_args(self, args):
        for arg in args:
            key, val = arg.removeprefix("--").split("=")
            *path, leaf = key.split(".")
            node = self
            for name in path:
                node = getattr(node, name)
            setattr(node, leaf, type(getattr(node, leaf))(val))


class SortDataset(Dataset):
    """Input: [0 0 2 1 0 1], output: [0 0 0 1 1 2]; one sequence of both with the targets of the input masked."""

    def __init__(self, split, length=6, num_digits=3):
        self.split = split
        self.length = length
        self.num_digits = num_digits

    def __len__(self):
        return 10000

    def get_vocab_size(self):
        return self.num_digits

    def get_block_size(self):
        return self.length * 2 - 1

    def __getitem__(self, idx):
        while True:
            inp = torch.randint(self.num_digits, size=(self.length,), dtype=torch.long)
            # Half of the time the input is boosted to have many repeats.
            if torch.rand(1).item() < 0.5 and inp.unique().nelement() > self.length // 2:
                continue
            h = hash(tuple(inp.tolist()))
            inp_split = "test" if h % 4 == 0 else "train"
            if inp_split == self.split:
                break
        sol = torch.sort(inp)[0]
        cat = torch.cat((inp, sol), dim=0)
        x = cat[:-1].clone()
        y = cat[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd),
                "c_proj": nn.Linear(4 * config.n_embd, config.n_embd),
                "dropout": nn.Dropout(config.resid_pdrop),
            }
        )
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))

    def attention(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        m = self.mlp
        return x + m.dropout(m.c_proj(F.gelu(m.c_fc(self.ln_2(x)))))


class GPT(nn.Module):
    @staticmethod
    def get_default_config():
        return CfgNode(
            n_layer=2,
            n_head=3,
            n_embd=48,
            vocab_size=None,
            block_size=None,
            embd_pdrop=0.1,
            resid_pdrop=0.1,
            attn_pdrop=0.1,
        )

    def __init__(self, config):
        super().__init__()
        assert config.vocab_size is not None and config.block_size is not None
        self.block_size = config.block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.embd_pdrop),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        n_params = sum(p.numel() for p in self.transformer.parameters())
        print(f"number of parameters: {n_params}")

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            torch.nn.init.zeros_(module.bias)

    def configure_optimizers(self, train_config):
        """Decay weights of linear layers, and neither biases nor norms nor embeddings."""
        decay, no_decay = set(), set()
        for mn, m in self.named_modules():
            for pn, _ in m.named_parameters(recurse=False):
                fpn = f"{mn}.{pn}" if mn else pn
                if pn.endswith("weight") and isinstance(m, nn.Linear):
                    decay.add(fpn)
                else:
                    no_decay.add(fpn)
        param_dict = dict(self.named_parameters())
        assert len(decay & no_decay) == 0 and len(param_dict.keys() - (decay | no_decay)) == 0
        optim_groups = [
            {"params": [param_dict[pn] for pn in sorted(decay)], "weight_decay": train_config.weight_decay},
            {"params": [param_dict[pn] for pn in sorted(no_decay)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(optim_groups, lr=train_config.learning_rate, betas=train_config.betas)

    def forward(self, idx, targets=None):
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, do_sample=False):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.block_size :])
            probs = F.softmax(logits[:, -1, :], dim=-1)
            if do_sample:
                idx_next = torch.multinomial(probs, num_samples=1)
            else:
                _, idx_next = torch.topk(probs, k=1, dim=-1)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx


class Trainer:
    @staticmethod
    def get_default_config():
        return CfgNode(
            device="auto",
            num_workers=0,
            max_iters=40,
            batch_size=50,
            learning_rate=3e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            grad_norm_clip=1.0,
        )

    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset
        self.callbacks = defaultdict(list)
        self.device = "cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu"
        self.model = self.model.to(self.device)
        print("running on device", self.device)
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        train_loader = DataLoader(
            self.train_dataset,
            sampler=torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10)),
            shuffle=False,
            pin_memory=torch.cuda.is_available(),
            batch_size=config.batch_size,
            num_workers=config.num_workers,
        )
        model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            batch = [t.to(self.device) for t in batch]
            x, y = batch
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


if __name__ == "__main__":
    C = CfgNode(
        system=CfgNode(seed=3407, work_dir="./out/sorter"),
        model=GPT.get_default_config(),
        trainer=Trainer.get_default_config(),
    )
    C.merge_from_args(sys.argv[1:])
    set_seed(C.system.seed)
    os.makedirs(C.system.work_dir, exist_ok=True)
    train_dataset = SortDataset("train")
    test_dataset = SortDataset("test")
    C.model.vocab_size = train_dataset.get_vocab_size()
    C.model.block_size = train_dataset.get_block_size()
    model = GPT(C.model)
    trainer = Trainer(C.trainer, model, train_dataset)

    def batch_end_callback(trainer):
        if trainer.iter_num % 8 == 0:
            print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")
        if (trainer.iter_num + 1) % 20 == 0:
            torch.save(model.state_dict(), os.path.join(C.system.work_dir, "model.pt"))

    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()

    model.load_state_dict(torch.load(os.path.join(C.system.work_dir, "model.pt"), map_location=trainer.device))
    model.eval()

    def eval_split(split, max_batches):
        dataset = {"train": train_dataset, "test": test_dataset}[split]
        n = dataset.length
        results = []
        loader = DataLoader(dataset, batch_size=100, num_workers=0, drop_last=False)
        for b, (x, y) in enumerate(loader):
            x, y = x.to(trainer.device), y.to(trainer.device)
            cat = model.generate(x[:, :n], n, do_sample=False)
            correct = (y[:, -n:] == cat[:, n:]).all(1).cpu()
            results.extend(int(c) for c in correct)
            if b + 1 >= max_batches:
                break
        print(f"{split} final score: {sum(results)}/{len(results)} = {100 * sum(results) / len(results):.2f}% correct")

    with torch.no_grad():
        eval_split("train", max_batches=2)
        eval_split("test", max_batches=2)
    probe = torch.tensor([[0, 0, 2, 1, 0, 1]], dtype=torch.long, device=trainer.device)
    print("input sequence:", probe.tolist(), "sorted:", model.generate(probe, 6)[:, 6:].tolist())
