"""Bytes that each layout sends in a step and that a rank holds, compared with formulas.

Bytes are those that the kernel has counted on the connections of a rank, from any sender: torch's DDP and FSDP, the sum
in tree order, and further messages of a step. The rank that sends most is shown. The load of the machine has no effect.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from communication_rank import BATCH, CLASSES, CONTEXT, WIDTH, Case, Traffic, measure, parameter_bytes
from machine import describe_machine, machine_line, markdown_table, save

import samestep
from samestep.config import MeshConfig, StrategyConfig, resolve_mesh
from samestep.config.strategy import MeshShape
from samestep.errors import SamestepError

HERE = Path(__file__).parent
BLOCKS = 4
ADAMW = 4  # parameters, gradients and two numbers of the optimizer for each

BEFORE = """\
A GPT of P = {parameters} MB of parameters in 32 bits, AdamW, a global batch of {batch} x {context} tokens
(H = {hidden} MB between blocks, divided by the number of data ranks D), V = N microbatches. MB are millions of bytes,
in a step, of the rank that sends or holds most. N ranks, of which S share parameters, T (a power of two) share
products, R are copies. Every rank gets the outputs, O = {outputs} MB. Held are parameters,
gradients and optimizer state."""
AFTER = """\
Under `fsdp` gloo sums whole gradients; a backend that sums to parts, such as NCCL, sends (S-1)/S P less with `fast`.
Embedding and output layer of this GPT are tied: under `pp` the first and the last stage hold the weight W and sum its
gradients for each microbatch; under `tp` every rank has the weight. `pp` is as large as its largest stage."""


@dataclass(frozen=True)
class Formula:
    """Expected bytes that a layout sends and holds, for a model of `P` bytes."""

    sent: Callable[[MeshShape, int], float]
    words: str
    held: Callable[[MeshShape, int], float]


def ring(ranks: int, size: float) -> float:
    """An all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def outputs(ranks: int) -> float:
    """The own rows of the outputs, to all ranks with other rows."""
    return (ranks - 1) / ranks * BATCH * CONTEXT * CLASSES * 4


def ddp(layout: MeshShape, size: float) -> float:
    return ring(layout.size, size) + outputs(layout.size)


def fsdp_bytes(layout: MeshShape, size: int) -> float:
    # Parameters are gathered twice, and whole gradients are summed.
    return 2 * (layout.shard - 1) / layout.shard * size + ddp(layout, size)


def hidden(layout: MeshShape) -> float:
    """The features that one block hands to the next, of the samples of one data rank."""
    return BATCH / layout.data_size * CONTEXT * WIDTH * 4


def tensor(layout: MeshShape, size: int) -> float:
    # Four sums over ranks in a tree; the product for queries, keys and values is gathered, three times as wide.
    blocks = BLOCKS * (4 * math.log2(layout.tensor) * hidden(layout) + 2 * ring(layout.tensor, hidden(layout)))
    return blocks + ring(layout.replicate, size / layout.tensor) + outputs(layout.replicate)


def pipelined(layout: MeshShape, size: int) -> float:
    # Of the last stage.
    own = BATCH / layout.data_size * CONTEXT * CLASSES * 4
    weight = layout.size / layout.data_size * CLASSES * WIDTH * 4
    to_stages = hidden(layout) + (layout.pipeline - 1) * own + weight
    return to_stages + ring(layout.replicate, size / layout.pipeline) + outputs(layout.replicate)


def whole(layout: MeshShape, size: int) -> float:
    return ADAMW * size


def divided(layout: MeshShape, size: int) -> float:
    return ADAMW * size / (layout.shard * layout.tensor * layout.pipeline)


DDP = Formula(ddp, "2(N-1)/N P + (N-1)/N O", whole)
HALF = Formula(lambda layout, size: ddp(layout, size / 2), "(N-1)/N P + (N-1)/N O", whole)
FSDP = Formula(fsdp_bytes, "2(S-1)/S P + 2(N-1)/N P + (N-1)/N O", divided)
TENSOR = Formula(tensor, "4 blocks x (4 log2 T + 4(T-1)/T) H + 2(R-1)/R P/T + (R-1)/R O", divided)
PIPELINED = Formula(
    pipelined, "H/D + (stages-1) O/D + V/D W + 2(R-1)/R P/stages + (R-1)/R O, of the last stage", divided
)

LAYOUTS: dict[str, tuple[StrategyConfig, Formula]] = {
    "ddp exact": (StrategyConfig(), DDP),
    "ddp fast": (StrategyConfig(), DDP),
    "ddp fp16": (StrategyConfig(hook="fp16"), HALF),
    "ddp bf16": (StrategyConfig(hook="bf16"), HALF),
    "fsdp": (StrategyConfig(name="fsdp"), FSDP),
    "fsdp exact": (StrategyConfig(name="fsdp"), FSDP),
    "hsdp": (StrategyConfig(name="hsdp", mesh=MeshConfig(replicate=2, shard=2)), FSDP),
    "tp": (StrategyConfig(name="tp"), TENSOR),
    "ddp x tp": (StrategyConfig(name="tp", mesh=MeshConfig(replicate=2, tensor=2)), TENSOR),
    "pp": (StrategyConfig(name="pp"), PIPELINED),
    "ddp x pp": (StrategyConfig(name="pp", mesh=MeshConfig(replicate=2, pipeline=2)), PIPELINED),
}


def cases(processes: list[int]) -> list[Case]:
    """Every layout on every number of processes that it has a mesh for."""
    found = []
    for number in processes:
        for name, (part, _) in LAYOUTS.items():
            if not part.mesh.sizes or number == 4:
                found.append(Case(name, number, part, "exact" if name.endswith(" exact") else "fast"))
    return found


def row(case: Case, traffic: Traffic) -> dict[str, Any]:
    """Return one measurement and the values of its formulas."""
    formula, size = LAYOUTS[case.name][1], parameter_bytes()
    layout = resolve_mesh(case.strategy, case.processes)
    return {
        "layout": case.name,
        "processes": case.processes,
        **asdict(traffic),
        "formula": formula.words,
        "sent_by_formula": formula.sent(layout, size),
        "held_by_formula": formula.held(layout, size),
    }


def page(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    table = markdown_table(
        ["layout", "processes", "sent a step, MB", "by formula", "formula", "messages", "held, MB", "by formula"],
        [
            [
                each["layout"],
                str(each["processes"]),
                _shown(each["sent"]),
                _shown(each["sent_by_formula"]),
                each["formula"],
                f"{each['messages']:g}",
                _shown(each["held"]),
                _shown(each["held_by_formula"]),
            ]
            for each in rows
        ],
    )
    parts = [
        "# Bytes that layouts send and hold",
        machine_line(machine),
        BEFORE.format(
            parameters=_shown(parameter_bytes()),
            batch=BATCH,
            context=CONTEXT,
            hidden=_shown(hidden(MeshShape())),
            outputs=_shown(BATCH * CONTEXT * CLASSES * 4),
        ),
        table,
        AFTER,
    ]
    return "\n\n".join(parts) + "\n"


def _shown(count: float) -> str:
    return f"{count / 1e6:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "communication.json")
    options = parser.parse_args()
    machine, rows = describe_machine(), []
    try:
        for case in cases(options.processes):
            if case.name in options.layouts:
                found = samestep.launch(measure, case, processes=case.processes, preload=("communication_rank",))
                rows.append(row(case, found))
                print({name: value for name, value in rows[-1].items() if name != "formula"}, flush=True)
    except SamestepError as error:
        raise SystemExit(f"error: {error}") from None
    save(options.output, {"machine": machine, "parameters": parameter_bytes(), "rows": rows}, page(machine, rows))
    print(f"written to {options.output} and {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
