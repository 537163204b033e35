"""Is a small GPT trained by Samestep as good as one trained by the loop that everybody writes?

The loop is of the well-known kind for tiny GPTs: one process, one file, batches of random windows, the mean of a
batch's tokens, AdamW with decay for matrices alone, clipping, warm-up and a cosine. Size, text, steps, batch size,
learning rates and evaluation are those of the recipe `language`; the differences are the order of data and of sums.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from machine import describe_machine, machine_line, markdown_table, save
from torch import nn
from torch.nn import functional

from samestep.config import Recipe
from samestep.recipes.recipe_files import load_recipe, recipe_data
from samestep.zoo.language import Blocks, load_language
from samestep.zoo.models import GPT

PLAIN, OURS = "plain loop", "samestep train language"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Plain(nn.Module):
    def __init__(self, vocabulary: int, n_embd: int, n_head: int, n_layer: int, block_size: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])
        self.norm = nn.LayerNorm(n_embd)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                last = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layer) if last else 0.02)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.tokens(idx) + self.places.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def train_plain(recipe: Recipe, train: Any, evaluation: Blocks, seed: int, steps: int, vocabulary: int) -> float:
    """The loss over all evaluation tokens after so many steps of the plain loop."""
    torch.manual_seed(seed)
    known = inspect.signature(GPT).parameters
    sizes = {
        key: recipe.model.options.get(key, known[key].default) for key in ("n_embd", "n_head", "n_layer", "block_size")
    }
    context, options = sizes["block_size"], recipe.optimizer.options
    model = Plain(vocabulary, **sizes)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=options["lr"],
        betas=tuple(options["betas"]),
    )
    data = torch.from_numpy(numpy.asarray(train).astype("int64"))
    warmup = round(recipe.schedule.warmup_epochs * steps)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] * factor(step, warmup, steps, recipe.schedule.final)
        starts = torch.randint(len(data) - context, (recipe.batch_size,))
        x = torch.stack([data[i : i + context] for i in starts])
        y = torch.stack([data[i + 1 : i + 1 + context] for i in starts])
        loss = functional.cross_entropy(model(x).view(-1, vocabulary), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.step.clip_norm or math.inf)
        optimizer.step()
    return evaluated(model, evaluation, vocabulary)


@torch.no_grad()
def evaluated(model: nn.Module, blocks: Blocks, vocabulary: int) -> float:
    total, count = 0.0, 0
    for number in range(len(blocks)):
        x, y = blocks[number]
        logits = model(x[None]).view(-1, vocabulary)
        total += float(functional.cross_entropy(logits.double(), y, reduction="sum"))
        count += len(y)
    return total / count


def factor(step: int, warmup: int, steps: int, final: float) -> float:
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))


def train_ours(seed: int, processes: int, cache: Path, overrides: list[str]) -> float:
    """Return the loss over all evaluation tokens after the recipe's epoch, from the events of the run."""
    with tempfile.TemporaryDirectory() as place:
        settings = [*overrides, f"step.seed={seed}", f"data.options.cache={cache}"]
        command = [str(Path(sys.executable).parent / "samestep"), "train", "language", "--name", "run"]
        subprocess.run([*command, "--processes", str(processes), *settings], cwd=place, check=True)
        lines = (Path(place) / "runs" / "run" / "events.jsonl").read_text().splitlines()
    return float([event for event in map(json.loads, lines) if event["event"] == "evaluation"][-1]["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2, help="of samestep; results do not depend on it")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "language_model.json")
    options = parser.parse_args()
    machine = describe_machine()
    recipe = load_recipe("language", options.overrides)
    torch.set_num_threads(recipe.step.threads)
    cache = Path(tempfile.mkdtemp(prefix="language-model-"))
    splits = load_language(**{**recipe.data.options, "cache": str(cache)})
    train, evaluation = splits.train, splits.evaluation
    assert isinstance(train, Blocks) and isinstance(evaluation, Blocks)
    steps = (len(train) + recipe.batch_size - 1) // recipe.batch_size
    rows: list[dict[str, float]] = []
    for seed in options.seeds:
        began = time.perf_counter()
        ours = train_ours(seed, options.processes, cache, options.overrides)
        between = time.perf_counter()
        plain = train_plain(recipe, train.tokens, evaluation, seed, steps, len(splits.classes))
        rows.append(
            {"seed": seed, PLAIN: plain, OURS: ours, "ratio": ours / plain}
            | {"our seconds": between - began, "plain seconds": time.perf_counter() - between}
        )
        print({key: round(value, 4) for key, value in rows[-1].items()}, flush=True)
    save(
        options.output,
        {"machine": machine, "recipe": recipe_data(recipe), "rows": rows},
        page(machine, splits, rows, options.processes),
    )


def page(machine: dict[str, Any], splits: Any, rows: list[dict[str, float]], processes: int) -> str:
    ratios = [row["ratio"] for row in rows]
    means = [statistics.mean(row[name] for row in rows) for name in (PLAIN, OURS)]
    spread = [statistics.stdev(row[name] for row in rows) if len(rows) > 1 else 0.0 for name in (PLAIN, OURS)]
    header = ["seed", PLAIN, OURS, "ratio"]
    table = [[f"{row['seed']:.0f}", *(f"{row[name]:.4f}" for name in (PLAIN, OURS, "ratio"))] for row in rows]
    table.append(["mean", *(f"{mean:.4f}" for mean in means), f"{means[1] / means[0]:.4f}"])
    return (
        "\n\n".join(
            [
                "# A tiny GPT by a plain loop and by Samestep: validation loss",
                machine_line(machine),
                f"The recipe `language`; {splits.notes[0]}.\nNats a byte over all evaluation tokens, after the same "
                "number of steps; the plain loop evaluates as exactly.\nThe plain loop ran in one process, samestep in "
                f"{processes}, one thread each.",
                markdown_table(header, table),
                f"Ratios {min(ratios):.4f} to {max(ratios):.4f}; standard deviation over seeds "
                f"{spread[0]:.4f} (plain) and {spread[1]:.4f} (samestep).",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
