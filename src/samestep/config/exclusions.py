"""Options that exclude each other: one table, and the one place that refuses such options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from samestep.errors import InputError

_OWN_PRECISION = "parameters and gradients in their own precision with this reduction"
_WITHOUT_DECAY = "--set optimizer.layer_decay=null"


class Exclusion(NamedTuple):
    """A pair of options that exclude each other.

    Attributes:
        options: names of the options.
        excludes: whether two values exclude each other.
        problem: format of the two values.
        expected: the rule, with its reason.
        fix: what resolves the error.
    """

    options: tuple[str, str]
    excludes: Callable[[Any, Any], bool]
    problem: str
    expected: str
    fix: str


EXCLUSIONS = (
    Exclusion(
        ("reduction", "gather"),
        lambda reduction, gather: reduction == "exact" and gather != "fp32",
        "samestep.parallel: reduction={!r} with gather={!r}",
        _OWN_PRECISION,
        "gather='fp32'",
    ),
    Exclusion(
        ("reduction", "hook"),
        lambda reduction, hook: reduction == "exact" and hook != "none",
        "samestep.parallel: reduction={!r} with hook={!r}",
        _OWN_PRECISION,
        "hook='none'",
    ),
    Exclusion(
        ("sharding", "tensor_slices"),  # a shard has rows of a matrix, and a slice has columns
        lambda strategy, slices: strategy in ("fsdp", "hsdp") and slices > 1,
        "samestep.parallel: tensor_slices={1} with strategy={0!r}",
        "a strategy that can divide matrix products: ddp, tp or pp",
        "strategy='ddp', or 'tp' if the model does not fit on a device",
    ),
    Exclusion(
        ("sharing", "pipeline"),
        lambda sharing, stages: sharing == "gloo" and stages > 1,
        "a pipeline of {1} stages on ranks that share GPUs",
        "stages of a pipeline on GPUs of their own: torch sends messages between stages by NCCL",
        "start one rank per GPU, or use another strategy",
    ),
    Exclusion(
        ("optimizer.layer_decay", "learning rate"),
        lambda decay, rate: decay is not None and rate is None,
        "optimizer.layer_decay is {}, and the optimizer has no learning rate",
        "an optimizer with an lr in each parameter group",
        _WITHOUT_DECAY,
    ),
    Exclusion(
        ("optimizer.layer_decay", "blocks"),
        lambda decay, blocks: decay is not None and not blocks,
        "optimizer.layer_decay is {}, and the model has no list of similar blocks",
        "a model of timm, or with a ModuleList or Sequential of modules of one class",
        _WITHOUT_DECAY,
    ),
)


def require_compatible(options: Mapping[str, Any], error: type[InputError] = InputError) -> None:
    """Require that options do not exclude each other.

    Args:
        options: values by the names of `EXCLUSIONS`; a pair is compared if both are there.
        error: type of the error.

    Raises:
        InputError: two options exclude each other.
    """
    for row in EXCLUSIONS:
        if not options.keys() >= set(row.options):
            continue
        values = [options[name] for name in row.options]
        if row.excludes(*values):
            problem = row.problem.format(*values)
            raise error(problem, expected=row.expected, fix=row.fix, code="E_INCOMPATIBLE")
