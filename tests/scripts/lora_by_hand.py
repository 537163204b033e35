"""Low-rank adaptation written by hand: a small Transformer is trained, frozen, and adapted to another task."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

VOCAB, LENGTH, RANK, ALPHA = 24, 12, 4, 8


class LoRALinear(nn.Module):
    """A frozen linear layer plus a low-rank update."""

    def __init__(self, linear, rank, alpha, dropout=0.05):
        super().__init__()
        self.linear = linear
        self.linear.weight.requires_grad = False
        if self.linear.bias is not None:
            self.linear.bias.requires_grad = False
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.linear(x) + (self.dropout(x) @ self.lora_A.T @ self.lora_B.T) * self.scaling

    @torch.no_grad()
    def merge(self):
        self.linear.weight += self.lora_B @ self.lora_A * self.scaling
        return self.linear


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.o_proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (p(x).view(B, T, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self, dim=48, depth=2, heads=4, num_classes=4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(torch.randn(1, LENGTH, dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.embed(x) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def apply_lora(module, targets=("q_proj", "v_proj")):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and name in targets:
            setattr(module, name, LoRALinear(child, RANK, ALPHA).to(device))
        else:
            apply_lora(child, targets)


def merge_lora(module):
    for name, child in module.named_children():
        if isinstance(child, LoRALinear):
            setattr(module, name, child.merge())
        else:
            merge_lora(child)


def print_trainable_parameters(model):
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.2f}")


def make_data(shift, count=210):
    """Class of a sequence: the quarter of the vocabulary that is most frequent, after a shift."""
    labels = torch.randint(4, (count,))
    common = labels[:, None] * 6 + torch.randint(6, (count, LENGTH))
    noise = torch.randint(VOCAB, (count, LENGTH))
    tokens = torch.where(torch.rand(count, LENGTH) < 0.5, common, noise)
    return TensorDataset((tokens + shift) % VOCAB, labels)


def train(model, loader, epochs, lr):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=lr)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        print(f"  epoch {epoch + 1}: loss {total / len(loader.dataset):.4f}")


@torch.no_grad()
def accuracy(model, dataset):
    model.eval()
    x, y = dataset.tensors
    return (model(x.to(device)).argmax(-1).cpu() == y).sum().item() / len(y)


base_train, base_test = make_data(0), make_data(0, 100)
task_train, task_test = make_data(3), make_data(3, 100)

model = Classifier().to(device)
print("Pretraining")
train(model, DataLoader(base_train, batch_size=32, shuffle=True), epochs=2, lr=3e-3)
print(f"accuracy: first task {accuracy(model, base_test):.3f}, second task {accuracy(model, task_test):.3f}")

for param in model.parameters():
    param.requires_grad = False
    param.grad = None
apply_lora(model)
model.head.weight.requires_grad = True
frozen = model.blocks[0].mlp[0].weight.clone()
print_trainable_parameters(model)

print("Adapting")
train(model, DataLoader(task_train, batch_size=32, shuffle=True), epochs=3, lr=1e-2)
assert torch.equal(frozen, model.blocks[0].mlp[0].weight)
assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
lora_state = {n: p for n, p in model.state_dict().items() if "lora_" in n}
torch.save(lora_state, "lora.pt")
print(f"accuracy: second task {accuracy(model, task_test):.3f}; {len(lora_state)} tensors saved")

with torch.no_grad():
    probe = task_test.tensors[0][:8].to(device)
    before = model.eval()(probe)
    merge_lora(model)
    after = model(probe)
print(f"merged: close {torch.allclose(before, after, atol=1e-4)}, {len(list(model.parameters()))} parameters")
