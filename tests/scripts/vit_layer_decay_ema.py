"""Fine-tuning a vision transformer: learning rates by depth, warm-up and cosine, stochastic depth, EMA of weights."""

import copy
import math
import os
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    image_size: int = 24
    patch_size: int = 6
    dim: int = 48
    depth: int = 3
    heads: int = 4
    classes: int = 8
    dropout: float = 0.1
    drop_path: float = 0.2
    lr: float = 2e-3
    layer_decay: float = 0.7
    weight_decay: float = 0.05
    warmup_steps: int = 5
    epochs: int = 3
    batch_size: int = 32
    ema_decay: float = 0.9
    clip_grad: float = 1.0
    seed: int = 1234


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
        return x * random_tensor / keep_prob


class Block(nn.Module):
    def __init__(self, dim, heads, dropout, drop_path):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 2), nn.GELU(), nn.Dropout(dropout), nn.Linear(dim * 2, dim))
        self.drop_path = DropPath(drop_path)
        self.gamma = nn.Parameter(0.5 * torch.ones(dim))

    def forward(self, x):
        y = self.norm1(x)
        y, _ = self.attn(y, y, y, need_weights=False)
        x = x + self.drop_path(self.gamma * y)
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, cfg.dim, cfg.patch_size, cfg.patch_size)
        tokens = (cfg.image_size // cfg.patch_size) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, cfg.dim))
        self.pos_embed = nn.Parameter(torch.randn(1, tokens + 1, cfg.dim) * 0.02)
        self.pos_drop = nn.Dropout(cfg.dropout)
        rates = torch.linspace(0, cfg.drop_path, cfg.depth).tolist()
        self.blocks = nn.ModuleList([Block(cfg.dim, cfg.heads, cfg.dropout, rate) for rate in rates])
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.classes)

    def no_weight_decay(self):
        return {"pos_embed", "cls_token"}

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.pos_drop(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class ModelEMA:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        msd = model.state_dict()
        for k, v in self.module.state_dict().items():
            if v.dtype.is_floating_point:
                v.mul_(self.decay).add_(msd[k].detach(), alpha=1 - self.decay)


def layer_id(name, depth):
    if name.startswith(("cls_token", "pos_embed", "patch_embed")):
        return 0
    if name.startswith("blocks"):
        return int(name.split(".")[1]) + 1
    return depth + 1


def param_groups_lrd(model, cfg):
    """One group for each layer, with and without weight decay; deeper layers learn faster."""
    groups = {}
    scales = [cfg.layer_decay ** (cfg.depth + 1 - i) for i in range(cfg.depth + 2)]
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        plain = p.ndim == 1 or name in model.no_weight_decay()
        layer = layer_id(name, cfg.depth)
        key = f"layer_{layer}_{'no_decay' if plain else 'decay'}"
        group = groups.setdefault(
            key, {"lr": cfg.lr * scales[layer], "weight_decay": 0.0 if plain else cfg.weight_decay, "params": []}
        )
        group["params"].append(p)
    return list(groups.values())


def make_data(count, cfg, seed):
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(cfg.classes, 3, cfg.image_size, cfg.image_size, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, cfg.classes, (count,), generator=generator)
    return TensorDataset(prototypes[labels] + 2 * torch.randn(prototypes[labels].shape, generator=generator), labels)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct, total, loss = 0, 0, 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        logits = model(x)
        loss += nn.functional.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(-1) == y).sum().item()
        total += len(y)
    return loss / total, correct / total


def main():
    cfg = Config()
    torch.manual_seed(cfg.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(make_data(290, cfg, 1), batch_size=cfg.batch_size, shuffle=True)
    test_loader = DataLoader(make_data(100, cfg, 2), batch_size=cfg.batch_size)
    model = VisionTransformer(cfg).to(device)
    ema = ModelEMA(model, cfg.ema_decay)
    optimizer = torch.optim.AdamW(param_groups_lrd(model, cfg), betas=(0.9, 0.999))
    total_steps = cfg.epochs * len(train_loader)

    def schedule(step):
        if step < cfg.warmup_steps:
            return (step + 1) / cfg.warmup_steps
        progress = (step - cfg.warmup_steps) / (total_steps - cfg.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    print(f"{len(optimizer.param_groups)} groups, {sum(p.numel() for p in model.parameters())} parameters")

    step = 0
    for epoch in range(cfg.epochs):
        model.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad)
            optimizer.step()
            scheduler.step()
            ema.update(model)
            if step % 4 == 0:
                lrs = [group["lr"] for group in optimizer.param_groups]
                print(
                    f"step {step:3d} loss {loss.item():.4f} norm {norm.item():.3f} lr {min(lrs):.2e} - {max(lrs):.2e}"
                )
            step += 1
        loss, accuracy = evaluate(model, test_loader, device)
        ema_loss, ema_accuracy = evaluate(ema.module, test_loader, device)
        print(f"epoch {epoch}: loss {loss:.4f} acc {accuracy:.3f} | ema loss {ema_loss:.4f} acc {ema_accuracy:.3f}")

    os.makedirs("vit_out", exist_ok=True)
    torch.save({"config": asdict(cfg), "model": model.state_dict(), "ema": ema.module.state_dict()}, "vit_out/last.pt")


if __name__ == "__main__":
    main()
