"""Tiny models of the families that a tensor axis divides, with data for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from samestep.zoo.model_libraries import transformers_model

SAMPLES, TOKENS, LENGTH = 47, 13, 6
DROPOUT = 0.2


class Layers(nn.Module):
    """Batch norm, dropout of divided and of whole tensors, an embedding, a frozen layer, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(TOKENS, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList([_Wide() for _ in range(2)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.norm(self.embed(tokens).mean(dim=1)))
        for block in [*self.blocks, self.blocks[0]]:
            hidden = block(hidden)
        logits: torch.Tensor = self.last(hidden)
        return logits


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(DROPOUT)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(functional.gelu(self.up(features)))
        added: torch.Tensor = self.outer(self.down(hidden))
        return features + added


PLAN = {"*.up": "column", "*.down": "row", "embed": "column_gathered", "frozen": "column_gathered", "last": "row"}


def _layers() -> nn.Module:
    return Layers()


def _gpt() -> nn.Module:
    from samestep.zoo.models import GPT

    return GPT(num_classes=TOKENS, n_embd=16, n_head=4, n_layer=2, block_size=LENGTH, dropout=DROPOUT)


def _hugging_face_gpt2() -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), DROPOUT)
    sizes = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": LENGTH}
    return transformers_model("GPT2LMHeadModel")(num_classes=TOKENS, **sizes, **rates)


def _bert() -> nn.Module:
    return _classifier("BertForSequenceClassification")


def _roberta() -> nn.Module:
    return _classifier("RobertaForSequenceClassification")


def _classifier(name: str) -> nn.Module:
    data = {"vocabulary": TOKENS, "padding": TOKENS - 1, "longest": LENGTH}
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    rates = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    return transformers_model(name)(num_classes=3, **data, **sizes, **rates)


def _timm_vit() -> nn.Module:
    from samestep.torchvision_import import make_torchvision_importable

    make_torchvision_importable()
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 3}
    drops = {"drop_rate": 0.1, "proj_drop_rate": DROPOUT, "attn_drop_rate": DROPOUT, "drop_path_rate": DROPOUT}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **sizes, **drops)
    return model


def _torchvision_vit() -> nn.Module:
    from samestep.torchvision_import import make_torchvision_importable

    make_torchvision_importable()
    from torchvision.models.vision_transformer import VisionTransformer

    drops = {"dropout": DROPOUT, "attention_dropout": DROPOUT}
    return VisionTransformer(16, 8, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=48, num_classes=3, **drops)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": _layers,
    "gpt": _gpt,
    "transformers gpt2": _hugging_face_gpt2,
    "bert": _bert,
    "roberta": _roberta,
    "timm vit": _timm_vit,
    "torchvision vit": _torchvision_vit,
}


def model_of(name: str) -> nn.Module:
    """A model in float64 whose weights are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]().double()


def plan_of(name: str) -> dict[str, str]:
    """Return the plan of a recipe; empty for models with a built-in plan."""
    return PLAN if name == "layers" else {}


def data_of(name: str) -> list[Any]:
    """Samples for a model."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(TOKENS - 1, (SAMPLES, LENGTH + 1), generator=draw)
    if name.endswith("vit"):
        images = torch.randn(SAMPLES, 3, 16, 16, generator=draw, dtype=torch.float64)
        return [(image, int(image.mean(dim=(1, 2)).argmax())) for image in images]
    if "bert" in name:
        mask = torch.ones(SAMPLES, LENGTH + 1, dtype=torch.int64)
        mask[::3, 4:] = 0
        return [
            ({"input_ids": t, "attention_mask": m}, int(t[0]) % 3)
            for t, m in zip(tokens[:, 1:], mask[:, 1:], strict=True)
        ]
    if name == "layers":
        return [(t, int(t[0]) % 4) for t in tokens]
    return [(t[:-1], t[1:]) for t in tokens]
