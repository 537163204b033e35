"""A masked autoencoder: a vision transformer encodes a quarter of the patches and a small decoder predicts the rest."""

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torchvision import datasets, transforms


def get_2d_sincos_pos_embed(embed_dim, grid_size):
    """Sines and cosines of both coordinates, and zeros for the class token: [1 + grid ** 2, dim]."""
    omega = 1.0 / 10000 ** (torch.arange(embed_dim // 4) / (embed_dim / 4))
    coordinates = torch.arange(grid_size)[:, None] * omega[None]
    one = torch.cat([coordinates.sin(), coordinates.cos()], dim=1)
    ys = one[:, None].expand(grid_size, grid_size, -1)
    xs = one[None].expand(grid_size, grid_size, -1)
    table = torch.cat([ys, xs], dim=-1).reshape(grid_size**2, embed_dim)
    return torch.cat([torch.zeros(1, embed_dim), table])


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, num_heads, norm_layer, mlp_ratio=2):
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = norm_layer(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * mlp_ratio), nn.GELU(), nn.Linear(dim * mlp_ratio, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MaskedAutoencoder(nn.Module):
    def __init__(self, img_size=32, patch_size=8, dim=48, depth=2, heads=4, decoder_dim=32, norm_pix_loss=False):
        super().__init__()
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        self.patch_size = patch_size
        self.norm_pix_loss = norm_pix_loss
        grid = img_size // patch_size
        self.patch_embed = nn.Conv2d(3, dim, patch_size, patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(get_2d_sincos_pos_embed(dim, grid)[None], requires_grad=False)
        self.blocks = nn.ModuleList([Block(dim, heads, norm_layer) for _ in range(depth)])
        self.norm = norm_layer(dim)
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.decoder_pos_embed = nn.Parameter(get_2d_sincos_pos_embed(decoder_dim, grid)[None], requires_grad=False)
        self.decoder_blocks = nn.ModuleList([Block(decoder_dim, heads, norm_layer)])
        self.decoder_norm = norm_layer(decoder_dim)
        self.decoder_pred = nn.Linear(decoder_dim, patch_size**2 * 3)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.constant_(m.bias, 0)

    def patchify(self, imgs):
        p = self.patch_size
        h = w = imgs.shape[2] // p
        x = imgs.reshape(imgs.shape[0], 3, h, p, w, p)
        return torch.einsum("nchpwq->nhwpqc", x).reshape(imgs.shape[0], h * w, p**2 * 3)

    def random_masking(self, x, mask_ratio):
        """Keep a random part of the patches of each row: those with the smallest noise."""
        N, L, D = x.shape
        len_keep = int(L * (1 - mask_ratio))
        noise = torch.rand(N, L, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        x_masked = torch.gather(x, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :len_keep] = 0
        mask = torch.gather(mask, dim=1, index=ids_restore)
        return x_masked, mask, ids_restore

    def forward_encoder(self, x, mask_ratio):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = x + self.pos_embed[:, 1:, :]
        x, mask, ids_restore = self.random_masking(x, mask_ratio)
        cls_token = self.cls_token + self.pos_embed[:, :1, :]
        x = torch.cat((cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x), mask, ids_restore

    def forward_decoder(self, x, ids_restore):
        x = self.decoder_embed(x)
        mask_tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
        x_ = torch.cat([x[:, 1:, :], mask_tokens], dim=1)
        x_ = torch.gather(x_, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1, :], x_], dim=1) + self.decoder_pos_embed
        for blk in self.decoder_blocks:
            x = blk(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:, :]

    def forward_loss(self, imgs, pred, mask):
        target = self.patchify(imgs)
        if self.norm_pix_loss:
            mean = target.mean(dim=-1, keepdim=True)
            var = target.var(dim=-1, keepdim=True)
            target = (target - mean) / (var + 1.0e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum()

    def forward(self, imgs, mask_ratio=0.75):
        latent, mask, ids_restore = self.forward_encoder(imgs, mask_ratio)
        pred = self.forward_decoder(latent, ids_restore)
        return self.forward_loss(imgs, pred, mask), pred, mask


def adjust_learning_rate(optimizer, epoch, args):
    """Linear warm-up, then half a cosine; `epoch` may be a fraction."""
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        progress = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
        lr = args.min_lr + (args.lr - args.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr * param_group.get("lr_scale", 1.0)
    return lr


def train_one_epoch(model, data_loader, optimizer, device, epoch, args):
    model.train(True)
    optimizer.zero_grad()
    total, count = 0.0, 0
    for data_iter_step, (samples, _) in enumerate(data_loader):
        lr = adjust_learning_rate(optimizer, data_iter_step / len(data_loader) + epoch, args)
        samples = samples.to(device, non_blocking=True)
        loss, _, _ = model(samples, mask_ratio=args.mask_ratio)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss_value
        count += 1
        if data_iter_step % 2 == 0:
            print(f"Epoch: [{epoch}]  [{data_iter_step}/{len(data_loader)}]  lr: {lr:.6f}  loss: {loss_value:.4f}")
    return {"loss": total / count, "lr": lr}


def main(args):
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transform_train = transforms.Compose(
        [
            transforms.RandomResizedCrop(32, scale=(0.2, 1.0), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    dataset_train = datasets.FakeData(150, (3, 40, 40), 10, transform_train)
    dataset_val = datasets.FakeData(40, (3, 32, 32), 10, transforms.ToTensor(), random_offset=500)
    data_loader_train = DataLoader(
        dataset_train, sampler=RandomSampler(dataset_train), batch_size=args.batch_size, drop_last=True
    )
    data_loader_val = DataLoader(dataset_val, sampler=SequentialSampler(dataset_val), batch_size=args.batch_size)
    model = MaskedAutoencoder(norm_pix_loss=args.norm_pix_loss).to(device)
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    for epoch in range(args.epochs):
        train_stats = train_one_epoch(model, data_loader_train, optimizer, device, epoch, args)
        model.eval()
        with torch.no_grad():
            losses = [model(samples.to(device), args.mask_ratio)[0].item() for samples, _ in data_loader_val]
        log_stats = {
            **{f"train_{k}": v for k, v in train_stats.items()},
            "val_loss": sum(losses) / len(losses),
            "epoch": epoch,
        }
        print("  ".join(f"{k}: {v:.4f}" for k, v in log_stats.items()))
        with open(Path(args.output_dir) / "log.txt", mode="a" if epoch else "w", encoding="utf-8") as f:
            f.write(json.dumps(log_stats) + "\n")
    torch.save({"model": model.state_dict(), "args": vars(args)}, Path(args.output_dir) / "checkpoint.pth")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", default=32, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--warmup_epochs", default=1, type=int)
    parser.add_argument("--lr", default=1.5e-3, type=float)
    parser.add_argument("--min_lr", default=1e-5, type=float)
    parser.add_argument("--mask_ratio", default=0.75, type=float)
    parser.add_argument("--norm_pix_loss", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output_dir", default="./mae_output")
    parser.add_argument("--seed", default=0, type=int)
    main(parser.parse_args())
