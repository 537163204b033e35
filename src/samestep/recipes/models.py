"""Models of recipes: weights from files, frozen parts, and options of memory and speed.

A file of weights that is damaged or does not fit the model raises `DataError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import checkpoint

from samestep.checkpoint.checksum import checksum
from samestep.config import RecipeStep
from samestep.config.validation import match_patterns, require_path
from samestep.distributed.kernels import set_tf32
from samestep.distributed.status import odd_ranks, ranks_text
from samestep.distributed.world import World, all_gather
from samestep.errors import DataError, RecipeError
from samestep.strategies.divided_parameters import full_state_dict
from samestep.zoo.paddle import read_pdparams

# Keys of checkpoints that contain the weights, in order of precedence.
_KEYS = ("state_dict", "model_state_dict", "model")
# Prefixes that DDP, torch.compile and Lightning add to every name.
_PREFIXES = ("module.", "_orig_mod.", "model.")

Tensors = dict[str, torch.Tensor]


def load_matching(model: nn.Module, file: Path, prefix: str = "") -> list[str]:
    """Load the tensors of `file` that match the model; a head of another task is left out.

    Args:
        model: changed in place.
        file: file of weights.
        prefix: text in front of the names in the file, such as `encoder.`.

    Returns:
        Notes for the user: removed keys and prefixes, and tensors without a counterpart.
    """
    own = model.state_dict()
    tensors, notes = _unwrap(_read(file), own, file)
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    taken = [name for name in own if name in tensors and tensors[name].shape == own[name].shape]
    left_out = [_shapes(name, own, tensors) for name in own if name not in taken]
    left_out += [f"{name}: only in the file" for name in tensors if name not in own]
    if not taken:
        raise _weights_error(
            f"no tensor of {file} has the name and shape of a tensor of the model",
            expected="the tensor names of the model",
            fix="model.pretrained_prefix=PREFIX, or rename them: the model has "
            f"{', '.join(list(own)[:2])}",
        )
    # Not strict: a head of another task keeps its initial weights.
    model.load_state_dict({name: tensors[name] for name in taken}, strict=False)
    notes.append(f"{len(taken)} tensors taken, {len(left_out)} left out")
    return [f"pretrained: {note}" for note in notes] + [f"  left out {line}" for line in left_out]


def load_all(model: nn.Module, file: Path) -> None:
    """Load every tensor of the model from `file`."""
    own = full_state_dict(model)
    tensors, _ = _unwrap(_read(file), own, file)
    both = [name for name in own if name in tensors]
    problems = {
        "missing": [name for name in own if name not in tensors],
        "of another shape": [
            _shapes(name, own, tensors) for name in both if tensors[name].shape != own[name].shape
        ],
        "only in the file": [name for name in tensors if name not in own],
    }
    counts = [
        f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in problems.items() if names
    ]
    if counts:
        raise _weights_error(
            f"the tensors of {file} differ from those of the model: {'; '.join(counts)}",
            expected="all tensors of the model with their names and shapes",
            fix="correct model.options (num_classes?), or train from the matching tensors: "
            "model.pretrained=FILE",
        )
    model.load_state_dict(tensors)


def check_same_weights(model: nn.Module, world: World) -> None:
    """Check that all ranks have the same weights. A collective operation.

    Each rank reads the file of weights, so that no rank waits for a broadcast.
    """
    checksums = dict(enumerate(all_gather(checksum(model.state_dict()), world)))
    if len(set(checksums.values())) > 1:
        odd = ranks_text(odd_ranks(checksums) or list(checksums))
        raise _weights_error(
            f"{odd} read other weights than the rest",
            expected="the same file in model.pretrained on every rank",
            fix="compare the files on all machines: sha256sum",
        )


def _unwrap(
    content: object, own: Mapping[str, torch.Tensor], file: Path
) -> tuple[Tensors, list[str]]:
    """Return the weights of a file by their names in the model, and what was removed.

    A prefix is removed only if no name of the model starts with the prefix.
    """
    removed: list[str] = []
    if isinstance(content, Mapping):
        key = next((key for key in _KEYS if isinstance(content.get(key), Mapping)), None)
        if key is not None:
            others = ", ".join(str(name) for name in content if name != key)
            ignored = f"; ignored: {others}" if others else ""
            removed.append(f"weights under {key!r}{ignored}")
            content = content[key]
    if not isinstance(content, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in content.values()
    ):
        raise _weights_error(
            f"{file} contains no plain weights",
            expected="a mapping of names to tensors",
            fix="save a state_dict",
        )
    tensors: Tensors = dict(content)
    own_prefixes = [one for one in _PREFIXES if any(name.startswith(one) for name in own)]
    added = [prefix for prefix in _PREFIXES if prefix not in own_prefixes]
    # Wrappers can be nested, so that a prefix appears when another one is removed.
    while prefix := next((one for one in added if any(n.startswith(one) for n in tensors)), None):
        names = [name for name in tensors if name.startswith(prefix)]
        for name in names:
            if name.removeprefix(prefix) in tensors:
                raise _weights_error(
                    f"{file} has both {name} and {name.removeprefix(prefix)}",
                    expected=f"one tensor per name without {prefix!r}",
                    fix="save one of the tensors: safetensors.torch.save_file",
                )
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        removed.append(f"{prefix!r} removed from {len(names)} names")
    return tensors, removed


def _shapes(name: str, own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> str:
    there = str(tuple(tensors[name].shape)) if name in tensors else "not"
    return f"{name}: {tuple(own[name].shape)} here, {there} in the file"


def _weights_error(problem: str, expected: str, fix: str) -> DataError:
    return DataError(problem, expected=expected, fix=fix, code="E_WEIGHTS")


def _read(file: Path) -> Any:
    require_path(file, "file", "a file of weights")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if file.suffix == ".pdparams":
            return read_pdparams(file).tensors
        # Weights alone: other pickles could run code.
        return torch.load(file, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as error:  # damaged files raise exceptions of many types
        raise DataError(
            f"{file} cannot be read as weights: {error}",
            expected="safetensors, a torch file of plain tensors, or a .pdparams file of "
            "PaddleViT's ViT",
            fix="save the weights again with safetensors.torch.save_file(model.state_dict(), ...)",
            code="E_UNREADABLE",
        ) from error


def transform_model(model: nn.Module, config: RecipeStep, device: torch.device) -> None:
    """Set the options of a model in place; parameter names stay unchanged.

    Raises:
        InputError: a pattern matches no module.
    """
    set_tf32(device, allowed=config.tf32)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    modules = {name: module for name, module in model.named_modules() if name}
    names = match_patterns(
        modules, config.recompute, key="step.recompute", kind="module", example="blocks.*"
    )
    for name in names:
        # The outermost modules only: their children are recomputed with them.
        if not any(name.startswith(f"{other}.") for other in names):
            module = modules[name]
            module.forward = partial(_checkpointed_forward, module.forward)
    if config.compile:
        # Dropout draws the same numbers as without compilation.
        torch._inductor.config.fallback_random = True
        # torch leaves frames of its own modules to the interpreter, so all of an `nn.Sequential`.
        is_of_torch = type(model).__module__.partition(".")[0] == "torch"
        with torch._dynamo.config.patch(wrap_top_frame=is_of_torch):
            model.compile(dynamic=False)


def _checkpointed_forward(forward: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    count = len(arguments)
    names = tuple(named)

    def compute(*values: Any) -> Any:
        return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

    # By position: torch restores the generators of the devices of these tensors, and has options of
    # its own by name.
    return checkpoint(compute, *arguments, *named.values(), use_reentrant=False)


def uses_batch_statistics(model: nn.Module) -> bool:
    """Return whether a norm layer of the model uses statistics of the batch in its present mode."""
    return any(
        isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def freeze(model: nn.Module, patterns: Sequence[str], exceptions: Sequence[str] = ()) -> list[str]:
    """Disable gradients of the parameters that match a pattern and no exception.

    Without patterns, all parameters but the exceptions are frozen. Return their names.
    """
    parameters = dict(model.named_parameters())
    match = partial(match_patterns, list(parameters), kind="parameter")
    trained = match(exceptions, key="model.freeze_except", example="head.*")
    frozen = match(patterns or ["*"], key="model.freeze", example="layer1.*")
    frozen = [name for name in frozen if name not in trained]
    if len(frozen) == len(parameters):
        raise RecipeError(
            "model.freeze matches every parameter",
            expected="at least one trained parameter",
            fix="remove patterns of model.freeze, or name the trained parameters in "
            "model.freeze_except",
            code="E_PATTERN",
        )
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


def set_training_mode(model: nn.Module) -> None:
    """Set training mode, and evaluation mode for norm layers with frozen parameters only.

    Such layers belong to a frozen pretrained part, and so do their running statistics.
    """
    model.train()
    for module in model.modules():
        are_trained = [parameter.requires_grad for parameter in module.parameters()]
        # A norm without parameters does not show whether the part around the norm is frozen.
        if isinstance(module, _NormBase) and are_trained and not any(are_trained):
            module.eval()
