"""What excludes what: options, and what models and scripts do. All errors E_INCOMPATIBLE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from samestep.errors import InputError, RunError, SamestepError

_OWN_PRECISION = "parameters and gradients in their own precision with this reduction"
_WITHOUT_DECAY = "optimizer.layer_decay=null"


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
        ("optimizer.layer_decay", "group_matcher"),
        lambda decay, matcher: decay is not None and matcher is None,
        "optimizer.layer_decay is {}, and the model does not number its layers",
        "a model of timm, or of a class with the same method group_matcher",
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


# --- what a model or a script does ---------------------------------------------------------------

# By what is excluded: formats of the problem and of the rule, and the fix.
_USES = {
    "gathers in a child process": (
        "{} is called in a child process, such as a loader worker",
        "calls in the ranks, which gather the parts of its parameters",
        "num_workers=0, or strategy='ddp' for this model",
    ),
    "parameters without shapes": (
        "strategy {!r} with a {} whose parameters have no shapes yet",
        "parameters with shapes, which can be divided",
        "call the model once with a batch before samestep.parallel, or use strategy='ddp'",
    ),
    "a second division": (
        "samestep.parallel received a {} whose parameters are divided already",
        "a module that no strategy has divided, with all its parts",
        "give the whole model to samestep.parallel once, and not its parts",
    ),
    "a parameter that is not divided": (
        "the parameter {} of {} was replaced",
        "the divided parameters of samestep.parallel, with new values at most",
        "change the module before samestep.parallel, or copy values into the parameter",
    ),
    "another shape of a divided tensor": (
        "{} of a tensor that is divided between ranks, which changes its shape in place",
        "a new tensor, such as that of t(), unsqueeze() or squeeze()",
        "tensor = tensor.t(); initialize parameters before samestep.parallel",
    ),
    "another shape of a divided parameter": (
        "{} of shape {} for `.data` of a divided parameter",
        "{2} of shape {3}",
        "change the model before samestep.parallel",
    ),
    "parameters from before the division": (
        "{}:{}: a parameter from before the first call of its module, which has divided it",
        "with this strategy, parameters that are taken from the module after its first call",
        "model.parameters() or model.state_dict() at this line, or --strategy ddp",
    ),
    "gradients that are differentiated again": (
        "create_graph=True through a call with activation checkpointing, or with strategy='fsdp'",
        "gradients of such calls that are not differentiated again",
        "leave out checkpointing, and use strategy='ddp', or 'fsdp' with reduction='exact'",
    ),
    "whole calls": (
        "a call of {} is computed whole: {}",
        "only divided calls, with strict=True",
        "change what the reason names, or leave out strict=True",
    ),
    "calls that cannot be divided": (
        "calls of {} cannot be divided: {}",
        "calls that can be divided: the whole batch does not fit into the memory of one device",
        "change what the reason names, or use a smaller batch, with whole=True",
    ),
    "other memory for divided rows": (
        "a tensor that is divided between ranks is given other memory",
        "a new tensor",
        "assign the new tensor to the name: x = y, x = x.reshape(...), x.copy_(y)",
    ),
    "divided rows below autograd": (
        "{} received rows of a batch that require gradients, below the autograd of torch",
        "operations of torch that dispatch on the class of a tensor",
        "give it a tensor that is whole, such as torch.stack(list(tensor))",
    ),
    "views of rows that were gathered": (
        "rows of an output were written after they were gathered, and a view of the output is used",
        "no view that was taken before the write, where gradients are needed",
        "take the view after the write, or write into a clone",
    ),
    "a collective in a call": (
        "{}:{}: {} in a call of {}",
        "no collective in a call: it is divided, and its result does not depend on the number of "
        "processes",
        "remove it, since a call has the values of the whole batch; or samestep.all_gather after "
        "the call",
    ),
    "a saved parameter that ranks cannot gather": (
        "a divided parameter is saved where ranks cannot gather it, such as in a thread",
        "full tensors",
        "{}",
    ),
    "foreground_weight without masks": (
        "foreground_weight is {}, without binary masks",
        "binary masks, which have a foreground",
        "remove the option",
    ),
}


def excluded(use: str, *values: object, error: type[SamestepError] = RunError) -> SamestepError:
    """Return the error of something that a model or a script must not do.

    Args:
        use: a key of the table above.
        values: in the order of the formats.
        error: type of the error.
    """
    problem, expected, fix = (text.format(*values) for text in _USES[use])
    return error(problem, expected, fix, code="E_INCOMPATIBLE")
