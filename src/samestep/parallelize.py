"""`samestep.parallel`: the calls of a model divided between the ranks."""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from samestep.config import Reduction, StrategyConfig
from samestep.config.exclusions import excluded, require_compatible
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.launcher.process_group import SessionOptions
from samestep.launcher.process_state import process_state
from samestep.microbatches import require_microbatches
from samestep.session import init
from samestep.strategies.divided_parameters import is_divided
from samestep.strategies.replicated import Replicated
from samestep.view.compiled import ForwardOfCalls, with_compiler
from samestep.view.first_calls import CallOptions
from samestep.view.parallel_module import ParallelModule
from samestep.view.strategy import Strategy
from samestep.view.view import View

ModuleType = TypeVar("ModuleType", bound=nn.Module)
StrategyName = Literal["ddp", "fsdp", "hsdp", "tp", "pp"]


def parallel(
    module: ModuleType,
    *,
    strategy: StrategyName | StrategyConfig | None = None,
    reduction: Literal["fast", "exact"] = "fast",
    batch_norm: Literal["global", "local"] = "global",
    microbatches: int | None = None,
    whole: bool = True,
    strict: bool = False,
    tensor_slices: int = 1,
    tensor_plan: Mapping[str, str] = MappingProxyType({}),
) -> ModuleType:
    """Divide the calls of a module between the ranks, and return the same module.

    In a call with a whole batch, each rank computes its own rows; outputs, and gradients of
    parameters and inputs, are those of the whole batch. The class of the module becomes a subclass
    of its own class. Joins the other ranks if `samestep.init` was not called.

    Args:
        module: a module with equal parameters on all ranks.
        strategy: `ddp`: each rank holds all parameters. `fsdp`: one part of every parameter.
            `hsdp`: `fsdp` within groups of ranks. `tp`: matrix products divided between ranks; with
            these three, make optimizers afterwards. `pp`: consecutive layers on different ranks.
            None: that of `samestep.init`, otherwise `ddp`.
        reduction: `fast`: results are equal to those of one process to rounding. `exact`: the same
            bits on every number of processes up to `microbatches`. Each microbatch is computed
            alone, on one thread, by deterministic kernels and uncompiled.
        batch_norm: statistics of the whole batch (`global`), or of the own rows (`local`): then
            results depend on the number of ranks.
        microbatches: number of slices of a batch, at least the number of ranks. None: the rows of
            the first call with a row for each rank, under `exact` with several rows; at most 8.
        whole: whether a rank can compute a whole batch. With False, a call that cannot be divided
            is an error.
        strict: raise an error if a call is not divided, with the reason.
        tensor_slices: slices of matrix products, a multiple of the tensor axis; 1 for its size.
        tensor_plan: divisions by shell pattern of module names; empty for those of known models.

    Raises:
        InputError: an argument is invalid, too many ranks, or ranks hold different parameters.
    """
    _require_arguments(module, reduction, batch_norm)
    if parallel_module(module) is not None:
        return module
    config = StrategyConfig(name=strategy) if isinstance(strategy, str) else strategy
    view = joined_view(config, reduction)
    options = CallOptions(reduction, microbatches, batch_norm, whole=whole, strict=strict)
    if process_state.observe_module is not None:
        name = config and config.name
        process_state.observe_module(module, {"strategy": name, **asdict(options)})
    _place(module)
    # Also on one rank: collectives in calls are refused on every number of ranks.
    view.parallel_modules.add(module)
    require_microbatches(microbatches, view.ranks.size)
    has_slices = reduction == "exact" and microbatches != 1
    if view.ranks.size > 1 or tensor_slices > 1 or has_slices:  # otherwise its own calls
        _divide(module, owner_of(module, options, config, tensor_slices, tensor_plan))
    return module


def owner_of(
    module: nn.Module,
    options: CallOptions,
    config: StrategyConfig | None = None,
    tensor_slices: int = 1,
    tensor_plan: Mapping[str, str] = MappingProxyType({}),
) -> ParallelModule:
    """Prepare a module for divided calls, on all ranks together; return the owner of its calls.

    Args:
        module: a module with equal parameters on all ranks.
        options: options of its calls.
        config: strategy; None for that of the world.
        tensor_slices: see `parallel`, as `tensor_plan`.
        tensor_plan: see `parallel`.
    """
    reduction = options.reduction
    view = joined_view(config, reduction)
    # Before the division, after which ranks hold different parts.
    view.require_equal(module, is_divided)
    # Whether it is a part of a module that is divided, or has such a part.
    is_part = any(map(is_divided, module.parameters()))
    strategy = _strategy(view, config, reduction, tensor_slices, tensor_plan, is_part=is_part)
    strategy.prepare(module)
    return ParallelModule(view, module, strategy, options)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Keep gradients of backwards in the block; the first backward after it sums them over ranks.

    For gradient accumulation: one sum for several backwards. `.grad` is complete after that
    backward. Under `exact` each backward is summed, and the block changes nothing.

    Args:
        module: result of `samestep.parallel`.
    """
    owner = parallel_module(module)
    # One process, or sums of microbatches, which cannot wait for later ones.
    if owner is None or owner.is_exact:
        yield
        return
    before = owner.strategy.is_deferred
    owner.strategy.is_deferred = True
    try:
        yield
    finally:
        owner.strategy.is_deferred = before


@contextmanager
def world_of_process(world: World, reduction: Reduction = "fast") -> Iterator[None]:
    """Let `samestep.parallel` divide calls between the ranks of a world, during the block."""
    options = SessionOptions(reduction=reduction, strategy=world.strategy)
    process_state.world = replace(world, session=replace(world.session, options=options))
    error: type[BaseException] | None = None
    try:
        yield
    except BaseException as raised:
        # After an error of this rank, the view ends without a word to the others.
        error = type(raised)
        raise
    finally:
        process_state.world = None
        _forget_view(error)


def any_rank(world: World, *flags: bool, place: str = "") -> list[bool]:
    """Return for each flag whether it is set on some rank; a collective.

    Args:
        world: the ranks.
        flags: the flags.
        place: what this rank has reached, for the error if other ranks have reached something else.

    Raises:
        RankMismatchError: other ranks are elsewhere.
    """
    if world.size > 1:
        return joined_view(None, "fast").any_rank(*flags, place=place)
    return list(flags)


def parallel_module(module: nn.Module) -> ParallelModule | None:
    """Return the state of `samestep.parallel` for a module, or None without divided calls."""
    owner: ParallelModule | None = getattr(type(module), "_samestep_owner", None)
    if owner is not None and owner.module is module:
        return owner
    return None


class _Parallel(nn.Module):
    """Mixin of the class of a module with divided calls."""

    _samestep_base: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A saved module is one of its own class, so that a program without Samestep can load it.
        owner = type(self)._samestep_owner  # type: ignore[attr-defined]
        with _own_class(self), owner.strategy.complete(self):
            create, arguments, *state = self.__reduce_ex__(protocol)
        if create is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle would compare the class with that of the object
            create = copyreg._reconstructor  # type: ignore[attr-defined]
            arguments = (arguments[0], object, None)
        return create, arguments, *state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = type(self)._samestep_owner  # type: ignore[attr-defined]
        with _own_class(self), owner.strategy.complete(self):
            copied = copy.deepcopy(self, memo)
        # A strategy belongs to one module: the hub refers to the parameters.
        strategy = owner.strategy.of_copy()
        strategy.prepare(copied)
        _divide(copied, ParallelModule(owner.view, copied, strategy, owner.options))
        return copied


@contextmanager
def _own_class(module: Any) -> Iterator[None]:
    """Give a module its own class during the block."""
    parallel_class = type(module)
    module.__class__ = parallel_class._samestep_base
    if parallel_class._samestep_forward is not None:
        # A forward that the script has patched in belongs to a copy or file too.
        module.__dict__["forward"] = parallel_class._samestep_forward
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
        module.__class__ = parallel_class


def _divide(module: nn.Module, owner: ParallelModule) -> None:
    owner.view.parallel_modules.add(module)
    base = type(module)
    # Compiled and patched modules have a forward of their own, which would hide that of the class.
    instance_forward = module.__dict__.pop("forward", None)

    def call(
        self: nn.Module, compiler: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        eager = instance_forward or functools.partial(base.forward, self)
        forward = with_compiler(compiler, eager)
        if owner.module is not self:  # another instance that the script made of this class
            return forward(*arguments, **options)
        return owner.call(forward, eager, arguments, options)

    # In a class: copies and files would contain an attribute of the module itself. The names are
    # those of the base, which messages and comparisons of ranks show.
    attributes = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_samestep_base": base,
        "_samestep_owner": owner,
        "_samestep_forward": instance_forward,
        "forward": ForwardOfCalls(call, base.forward),
    }
    module.__class__ = type(base.__name__, (_Parallel, base), attributes)


def joined_view(strategy: StrategyConfig | None, reduction: Literal["fast", "exact"]) -> View:
    """Return the view of this process; join the other ranks if necessary."""
    if strategy is not None and strategy.name in ("auto", "ddp"):
        strategy = None  # possible beside others
    world = init(strategy=strategy, reduction=reduction)
    view: View | None = process_state.view
    if view is None:
        view = View(world)
        # Sums of `exact` have the order of microbatches, which Rows do not know.
        view.keeps_rows = world.session.options.reduction == "fast"
        process_state.view = view
        process_state.exit_stack.push(_forget_view)  # before the world ends
    return view


def _strategy(
    view: View,
    config: StrategyConfig | None,
    reduction: str,
    slices: int,
    plan: Mapping[str, str],
    *,
    is_part: bool,
) -> Strategy:
    """Return the strategy of a module.

    Raises:
        InputError: it excludes another option.
    """
    world = process_state.world
    assert world is not None
    config = config or world.strategy
    name = config.name
    shape = world.mesh_shape
    is_exact = reduction == "exact"
    has_shards = name in ("fsdp", "hsdp") and world.size > 1
    options: dict[str, Any] = {"reduction": reduction, "gather": config.gather, "hook": config.hook}
    if has_shards:  # on one rank, options for several ranks are valid
        options |= {"sharding": name, "tensor_slices": slices}
    require_compatible(options)
    kind: Callable[..., Strategy] = Replicated
    if has_shards:
        from samestep.strategies.fsdp import Gathered, Sharded  # slow to import

        kind = Sharded
        if is_exact or is_part:
            # `exact` has a fixed order of sums, and torch's reduce-scatter that of the backend.
            kind = Gathered
    elif shape.tensor > 1 or shape.pipeline > 1 or slices > 1:
        from samestep.strategies.split_models import Split  # slow to import

        kind = partial(Split, slices=slices, plan=plan)
    return kind(world, view.ranks, view.reduction, view.begin_backward, is_exact=is_exact)


def _place(module: nn.Module) -> None:
    """Move the parts of a module to the devices of this rank, under the strategy `device_map`."""
    world = process_state.world
    if world is not None and world.strategy.name == "device_map":
        from samestep.strategies.device_map import apply_device_map  # slow to import

        apply_device_map(module, world)


def _forget_view(error: type[BaseException] | None, *_: Any) -> None:
    view: View | None = process_state.view
    process_state.view = None
    if view is not None:
        view.close(error)


def _require_arguments(module: Any, reduction: str, batch_norm: str) -> None:
    if not isinstance(module, nn.Module):
        raise InputError(
            f"samestep.parallel received a {type(module).__name__}",
            expected="a torch.nn.Module",
            fix="model = samestep.parallel(model); optimizers and loaders stay as they are",
            code="E_VALUE",
        )
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.jit.ScriptModule)
    if isinstance(module, wrappers):
        raise InputError(
            f"samestep.parallel received a module in {type(module).__name__}",
            expected="the module itself",
            fix="remove the wrapper: samestep.parallel(model)",
            code="E_WRAPPED_MODEL",
        )
    if parallel_module(module) is None and any(
        is_divided(parameter) for parameter in module.parameters()
    ):
        raise excluded("a second division", type(module).__name__, error=InputError)
    choices = (
        ("reduction", reduction, ("fast", "exact")),
        ("batch_norm", batch_norm, ("global", "local")),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise InputError(
                f"samestep.parallel: {name} is {value!r}",
                expected=" or ".join(allowed),
                fix=f"{name}={allowed[0]!r}",
                code="E_VALUE",
            )
