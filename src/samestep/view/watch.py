"""Watched call: the first call of a kind, computed whole, and its effects beside the outputs."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from samestep.distributed.devices import accelerator_module
from samestep.distributed.rng import torch_generator
from samestep.view.leaves import VALUES, TensorReference, flatten, is_held_elsewhere, kept_elsewhere
from samestep.view.operations import RULES, Operation, Operations, is_number
from samestep.view.reachable import FUNCTIONS, Reachable, changed, is_library, tensor_mark
from samestep.view.watched_graph import BackwardCode, captures

_ARGUMENTS = (
    *(*VALUES, *FUNCTIONS, types.BuiltinFunctionType),
    *(torch.layout, torch.memory_format, range, slice, type(Ellipsis)),
)
_HOOKS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
)
_SUMS = frozenset({torch.sum, torch.Tensor.sum})
_EQUALS = frozenset({torch.eq, torch.Tensor.eq, torch.Tensor.__eq__})
# Private: nn.TransformerEncoder and torch.distributions check with the last.
_ANY_OR_ALL = frozenset(
    {torch.any, torch.all, torch.Tensor.any, torch.Tensor.all, torch._is_all_true}
)
# Private: nn.TransformerEncoder asks it about its mask.
_ALIGNED = torch._nested_tensor_from_mask_left_aligned


@dataclass(frozen=True)
class Watched:
    """Result of a watched call.

    Attributes:
        result: result of the call.
        reason: why calls of this kind must be computed whole, as a phrase after "the forward"; None
            if no reason was found, and the next call can be tried.
        operations: operations in order, with their switches.
        uses_checkpointing: tensors are packed when they are saved for the backward, or parts are
            computed again in it.
        backward_code: code of the script that the backward runs.
        is_first_again: `reason` holds for this call only, since it has created parameters, buffers
            or submodules. The next call is to be watched again.
    """

    result: Any
    reason: str | None
    operations: tuple[Operation, ...]
    uses_checkpointing: bool
    backward_code: BackwardCode
    is_first_again: bool = False


def watch(
    module: nn.Module,
    compute: Callable[[], Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Watched:
    """Compute a whole call, and report its effects beside arguments and outputs."""
    received, spec = tree_flatten((arguments, options))
    tensors = [leaf for leaf in received if isinstance(leaf, torch.Tensor)]
    marks = _marks(tensors)
    structure = _structure(module)
    gradients = _gradients(module)
    reachable = _reachable(module, received)
    before = reachable.digest()
    recorder = _Recorder(tensors)
    start: int = torch._C._autograd._get_sequence_nr()  # private; of the first node of the call
    with recorder:
        result = compute()
    returned = flatten(result)[0]
    is_kept = is_held_elsewhere(result)  # not in a function below, which would hold the result too
    collected = captures([*module.parameters(), *tensors], returned, recorder.made, start)
    uses_checkpointing = bool(recorder.saving) or collected.has_checkpoint

    def reasons() -> Iterator[str | None]:
        yield _foreign_leaf(received, _ARGUMENTS, "is given")
        yield _property_of_submodules(module)
        if _marks(tensors) != marks:
            yield "writes into an argument"
        leaves, new_spec = tree_flatten((arguments, options))
        if new_spec != spec or any(
            new is not old for new, old in zip(leaves, received, strict=True)
        ):
            yield "changes a container among its arguments"
        yield changed(before, reachable.digest())
        yield recorder.reason
        if not all(is_library(hook) for hook in recorder.saving):
            yield "runs inside of hooks of saved tensors"
        if _gradients(module) != gradients:
            yield "writes gradients of parameters"
        yield _foreign_leaf(returned, VALUES, "returns")
        if is_kept:
            yield "returns an object that is kept elsewhere too"
        yield collected.reason
        yield _shared_memory(returned, [*received, *module.parameters(), *module.buffers()])
        yield kept_elsewhere(module, [*received, *returned], recorder.made, uses_checkpointing)

    is_first_again = structure != _structure(module)
    reason: str | None = "creates parameters, buffers or submodules"
    if not is_first_again:  # otherwise other effects of the call are seen in the next one
        # The first one ends the search: the last may collect garbage, which is slow.
        reason = next((words for words in reasons() if words is not None), None)
    return Watched(
        result=result,
        reason=reason,
        operations=tuple(recorder.functions),
        uses_checkpointing=uses_checkpointing,
        backward_code=BackwardCode(module.modules(), collected.functions),
        is_first_again=is_first_again,
    )


def _reachable(module: nn.Module, received: Sequence[Any]) -> Reachable:
    values = (*module.parameters(), *module.buffers(), *received)
    # Their `__torch_function__`, if the script defines it, runs in the call.
    classes = {type(value) for value in values if isinstance(value, torch.Tensor)}
    code = (*FUNCTIONS, types.BuiltinFunctionType)
    functions = [leaf for leaf in received if isinstance(leaf, code)]
    return Reachable(module, (functions, *classes, *_hooks_of_saved_tensors()))


def _structure(module: nn.Module) -> list[Any]:
    """Return facts that change where parameters, buffers or submodules are created."""
    collected: list[Any] = []
    for name, part in module.named_modules():
        parameters = [(key, id(value), type(value)) for key, value in part._parameters.items()]
        # Names only: a call may replace buffers. Those of TorchScript cannot be iterated.
        collected.append((name, id(part), parameters, list(part._buffers.keys())))
    return collected


def _gradients(module: nn.Module) -> list[Any]:
    return _marks([parameter.grad for parameter in module.parameters() if parameter.is_leaf])


def _marks(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return facts that a write changes; inference tensors count no versions."""
    return [
        None if tensor is None else tensor_mark(tensor, content=tensor.is_inference())
        for tensor in tensors
    ]


def _property_of_submodules(module: nn.Module) -> str | None:
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            return f"has parameters of torch.jit in {type(part).__name__}"
        # Hooks of the module itself run outside of the call, with whole gradients.
        if part is not module and (part._backward_hooks or part._backward_pre_hooks):
            return f"has a backward hook on {type(part).__name__}"
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            return "has sparse gradients"
    return None


def _foreign_leaf(leaves: Sequence[Any], known: tuple[type, ...], verb: str) -> str | None:
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *known)):
            return f"{verb} an object of type {type(leaf).__name__}"
    return None


def _hooks_of_saved_tensors() -> Sequence[Callable[..., Any]]:
    """Return the present hooks of checkpoints and of `torch.autograd.graph.saved_tensors_hooks`."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # private
    return hooks or ()


def _shared_memory(outputs: Iterable[Any], held: Iterable[Any]) -> str | None:
    """Return a reason if outputs share memory with each other or with `held`.

    A script that writes into one of them would change the other, which gathered outputs cannot do.
    Parts of a `chunk` share memory too, but do not overlap.
    """
    taken = {one.untyped_storage().data_ptr() for one in held if _has_memory(one)}
    owners: dict[int, torch.Tensor] = {}
    for output in {id(leaf): leaf for leaf in outputs if _has_memory(leaf)}.values():
        storage = output.untyped_storage()
        elements = storage.nbytes() // output.element_size()
        owned = owners.setdefault(storage.data_ptr(), torch.zeros(elements, dtype=torch.uint8))
        if storage.data_ptr() in taken or len(owned) != elements:
            return "returns tensors that share memory"
        place = owned.as_strided(output.shape, output.stride(), output.storage_offset())
        if place.any():
            return "returns tensors that share memory"
        place.fill_(1)
    return None


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0


# --- operations ----------------------------------------------------------------------------------


class _Recorder(Operations):
    """Operations of a watched call, with their use of values of rows.

    A tensor that is computed from tensors with rows is tainted: in a divided call its value differs
    between ranks. The taint is true if its first dimension has followed the rows all the way.

    Args:
        received: tensors among the arguments.

    Attributes:
        reason: first reason for whole calls.
        saving: hooks of saved tensors.
        made: tensors that the call made, by identity.
    """

    def __init__(self, received: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.reason: str | None = None
        self.saving: dict[Callable[..., Any], None] = {}
        self.made: dict[int, TensorReference] = {}
        self._rows = next((tensor.shape[0] for tensor in received if tensor.dim()), 0)
        self._taints: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()
        # Scalars for any or all of a number of values.
        self._conditions: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        for tensor in received:
            if tensor.dim() and tensor.shape[0] == self._rows:
                self._taint(tensor, True)

    def note_attribute(self, tensor: torch.Tensor, value: Any) -> None:
        """Taint a part of a tainted tensor."""
        if isinstance(value, Node):
            # Private: the class of a function written in Python. A checkpoint reads its own node
            # in torch 2.11; others would hook into it.
            kind = getattr(type(value), "_forward_cls", None)
            if kind is None or kind.__module__ != checkpoint.__name__:
                self._refuse("uses the graph of a tensor")
        elif isinstance(value, torch.Tensor) and self._taint_of(tensor) is not None:
            self._taint(value, False)

    def observe(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """Compute an operation and note its use of values of rows."""
        self.saving.update(dict.fromkeys(_hooks_of_saved_tensors()))
        if function in _HOOKS:
            self._refuse("sets a hook of a tensor")
        if function is torch.Tensor.backward:
            self._refuse("calls backward")
        if options.get("sparse") is True:
            self._refuse("has sparse gradients")
        tensors = _tensors((arguments, options))
        taints = {id(tensor): self._taint_of(tensor) for tensor in tensors}
        is_tainted = any(taint is not None for taint in taints.values())
        by_rows = is_tainted and False not in taints.values()
        clean: list[tuple[torch.Tensor, int]] = []
        if is_tainted:
            clean = [
                (tensor, tensor._version)
                for tensor in tensors
                if taints[id(tensor)] is None and not tensor.is_inference()
            ]
        generators = None if function in RULES else _generators()  # rules know the draws
        result = compute()
        for tensor in _tensors(result):
            # Else an operation in place, or `to` where nothing is to do.
            if id(tensor) not in taints:
                self.made[id(tensor)] = weakref.ref(tensor)
            if is_tainted:
                self._taint(tensor, by_rows)
        # An operation in place has written rows into a tensor without rows.
        for tensor, version in clean:
            if tensor._version != version:
                self._taint(tensor, False)
                if tensor._base is not None:
                    self._taint(tensor._base, False)
        if is_tainted and self._takes_numbers(function, arguments, result, by_rows):
            self._refuse(f"turns values of rows into Python numbers ({_name(function)})")
        if generators is not None and generators != _generators():
            self._refuse(f"draws random numbers inside of {_name(function)}")
        return result

    def _takes_numbers(
        self, function: Callable[..., Any], arguments: Sequence[Any], result: Any, by_rows: bool
    ) -> bool:
        """Whether a function of tainted tensors has Python numbers as results.

        Except for `any` and `all` of values of rows, which ranks compare in each call. Their
        scalars are noted here.
        """
        # Without positional arguments, as in `torch.mean(input=x)`, it is no condition.
        if arguments and isinstance(result, torch.Tensor) and not result.dim():
            first, *others = arguments
            if function in _ANY_OR_ALL or (function in _SUMS and first.dtype is torch.bool):
                if by_rows or first in self._conditions:
                    self._conditions[result] = first.numel()
            elif (
                function in _EQUALS
                and others
                and isinstance(first, torch.Tensor)
                and self._conditions.get(first) == others[0]
            ):
                self._conditions[result] = 1  # `mask.sum() == mask.numel()` is `mask.all()`
        if not is_number(function, result) or (function is _ALIGNED and by_rows):
            return False
        return function is not torch.Tensor.__bool__ or arguments[0] not in self._conditions

    def _taint(self, tensor: torch.Tensor, by_rows: bool) -> None:
        # With one row every dimension is a multiple of it.
        if by_rows:
            by_rows = self._rows > 1 and tensor.dim() > 0 and tensor.shape[0] > 0
            by_rows = by_rows and tensor.shape[0] % self._rows == 0
        self._taints[tensor] = by_rows

    def _taint_of(self, tensor: torch.Tensor) -> bool | None:
        """Return the taint of a tensor or of the base of a view, and None for another tensor."""
        if tensor in self._taints:
            return self._taints[tensor]
        if tensor._base is not None and self._taint_of(tensor._base) is not None:
            return False
        return None

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function)).strip("_")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _generators() -> tuple[int, ...]:
    """Return the states of torch's generators, from which each operation may draw."""
    module = accelerator_module()
    if not module.is_initialized():
        return (torch_generator(),)
    return torch_generator(), *(generator.get_offset() for generator in module.default_generators)
