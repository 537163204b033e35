"""Partition of a model into pipeline stages: their boundaries, and the graph of each stage."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from samestep.distributed.rng import generator_state
from samestep.errors import InputError
from samestep.view.kinds import submodules
from samestep.view.reachable import Reachable, changed
from samestep.view.snapshot import Snapshot

# Parts of names of functions that must run exactly once.
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal")
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "setitem")
# Functions and methods of tensors with results without a gradient.
_SIZES = ("size", "dim", "ndimension", "numel", "nelement", "stride")
_PROPERTIES = ("getattr", *_SIZES, "is_floating_point")
# Raised by fx for code that it cannot trace, and by such code, which receives proxies.
_TRACING_ERRORS = (
    fx.proxy.TraceError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    KeyError,
    IndexError,
)
stage_error = partial(InputError, code="E_PIPELINE")


def trace(model: nn.Module, opened: Set[str] = frozenset(), *, training: bool) -> fx.Graph:
    """Return the graph of a forward, down to children and elements of sequential modules.

    The inside of modules is not traced: modules read their own training mode at run time. The
    model's own forward is traced with `self.training` set to `training`. `opened` names further
    modules to trace into. Buffers and attributes that the forward writes keep their values.

    Raises:
        InputError: the control flow of the forward depends on tensor values, the forward itself
            draws numbers that do not depend on tensors, which would be constants of the graph, or
            it changes values outside of the model.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    # The tracer runs the code of the forward, whose writes must not stay in the model.
    before = Snapshot(submodules(model), None, device)
    # Writes to other objects cannot be undone; they are found and refused.
    reachable = Reachable(model)
    values = reachable.digest()
    model.train(training)
    generators = generator_state()
    try:
        graph = _Tracer(model, opened).trace(model)
        draws = generator_state() != generators
    except _TRACING_ERRORS as error:
        raise stage_error(
            f"the forward of {type(model).__name__} cannot be partitioned: "
            f"{type(error).__name__}: {error}",
            expected="the code between module calls takes the same path for all tensor values",
            fix="move such code into a module, or into a function passed to torch.fx.wrap; "
            "or --strategy fsdp",
        ) from error
    finally:
        # The tracer adds these to the model for the graph.
        added = vars(model).items()
        constants = {key: value for key, value in added if key.startswith("_tensor_constant")}
        before.restore()
        vars(model).update(constants)
    if (change := changed(values, reachable.digest())) is not None:
        raise stage_error(
            f"the forward of {type(model).__name__} {change}",
            expected="a forward that changes nothing but the model: it is traced once",
            fix="keep the value in a buffer, or change it in the training loop; or --strategy fsdp",
        )
    if draws:
        raise stage_error(
            f"the forward of {type(model).__name__} draws random numbers between the calls of its "
            "modules",
            expected="draws inside modules, in each forward",
            fix="move the draw into a module, or into a function passed to torch.fx.wrap; "
            "or --strategy fsdp",
        )
    return graph


def input_names(model: nn.Module) -> list[str]:
    """Return the parameters of a forward without default; a pipeline does not pass the others."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in _signature(model).parameters.items()
        if parameter.kind not in variadic and parameter.default is inspect.Parameter.empty
    ]


def bind_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a forward by name.

    Raises:
        InputError: an argument is passed for a parameter with a default.
    """
    inputs = _signature(model).bind(*args, **kwargs).arguments
    names = input_names(model)
    extra = [name for name in inputs if name not in names]
    if extra:
        raise stage_error(
            f"the data contain the argument {extra[0]!r}, which has a default in the forward of "
            f"{type(model).__name__}",
            expected="a pipeline is built with the defaults of the forward, before data are known",
            fix=f"define a forward with {extra[0]} as a required parameter, or --strategy fsdp",
        )
    return inputs


def _signature(model: nn.Module) -> inspect.Signature:
    """Return the signature of the class's forward, without `self` and wrappers of the instance."""
    # Of the class: `samestep.parallel` wraps the forward of the instance.
    signature = inspect.signature(type(model).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class _Tracer(fx.Tracer):
    def __init__(self, model: nn.Module, opened: Set[str]) -> None:
        # Shapes of parameters are numbers then, and code may branch on them.
        super().__init__(param_shapes_constant=True)
        self._opened = opened
        self._inputs = input_names(model)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A module with a replaced forward (activation checkpointing) is a leaf.
        is_opened = (
            module_qualified_name in self._opened or type(m).forward is nn.Sequential.forward
        )
        return not is_opened or "forward" in vars(m)

    def create_args_for_root(
        self,
        root_fn: Any,
        is_module: bool,
        concrete_args: dict[str, Any] | tuple[Any, ...] | None = None,
    ) -> tuple[Any, list[Any]]:
        # torch creates inputs for parameters with defaults too; then `x is None` is always false.
        proxies = {name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs}
        parameters = _signature(self.root).parameters
        keywords = [
            name for name in proxies if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        ]
        kwargs = {name: proxies.pop(name) for name in keywords}
        return partial(type(self.root).forward, **kwargs), [self.root, *proxies.values()]


@dataclass(frozen=True)
class Partition:
    """Partition of a model into stages.

    Attributes:
        graphs: of each stage, by training mode. The first placeholders are the outputs of the
            previous stage, the others, with the prefix `input_`, are inputs of the model.
        parameter_stages: stages that use a parameter, in order, by parameter name.
        module_stages: stage of each called module, by module name.
    """

    graphs: dict[bool, list[fx.Graph]]
    parameter_stages: dict[str, tuple[int, ...]]
    module_stages: dict[str, int]

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.graphs[True])


def partition_model(model: nn.Module, names: Sequence[str], count: int) -> Partition:
    """Partition `model` into stages.

    Stages after the first begin at the modules `names`; without names, there are `count` stages of
    balanced size.

    Raises:
        InputError: the model cannot be partitioned.
    """
    if names:  # the ancestors of the named modules
        opened = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    else:
        opened = _opened(model, count)
    # Code such as `if self.training` gives each mode another graph.
    traces = {training: trace(model, opened, training=training) for training in (True, False)}
    starts = list(names) or _balanced_starts(model, traces[True], count)
    graphs = {
        training: _stage_graphs(
            graph, _replicated_nodes(model, graph), _stage_of_nodes(graph, starts), len(starts) + 1
        )
        for training, graph in traces.items()
    }
    module_stages: dict[str, int] = {}
    users: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in model.parameters()}
    for stage, graph in (pair for stages in graphs.values() for pair in enumerate(stages)):
        for node in graph.nodes:
            name = str(node.target)
            for parameter in _parameters_of(model, node):
                users[parameter].add(stage)
            if node.op != "call_module":
                continue
            first = module_stages.setdefault(name, stage)
            if stage != first and any(True for _ in model.get_submodule(name).buffers()):
                raise stage_error(
                    f"the module {name!r} with buffers is used in stages {first + 1} and "
                    f"{stage + 1}",
                    expected="a module with buffers is used in one stage",
                    fix="set other strategy.stages",
                )
    # An unused parameter belongs to the first stage, which saves it.
    parameter_stages = {
        name: tuple(sorted(users[p])) or (0,) for name, p in model.named_parameters()
    }
    return Partition(graphs, parameter_stages, module_stages)


def require_single_uses(model: nn.Module, partition: Partition) -> None:
    """Require that gradients of shared weights are summed in the order of one process.

    Each stage sums those of its own uses first, and autocast rounds a weight in each stage. So a
    stage uses a shared weight once, and at most one of them not as an embedding.

    Raises:
        InputError: there is another shared weight.
    """
    for name, parameter in model.named_parameters():
        stages = partition.parameter_stages[name]
        if len(stages) < 2 or not parameter.requires_grad:
            continue
        uses = [_single_use(model, partition.graphs[True][stage], parameter) for stage in stages]
        if "" in uses or len(uses) - uses.count("table") > 1:
            raise InputError(
                f"several stages use the parameter {name!r}, several times or not as an embedding",
                expected="with exact, each stage uses a shared weight once, in an nn.Linear, an "
                "nn.Embedding or a function between modules, and all but one in an nn.Embedding",
                fix="name stages that do not share it: strategy.stages; or reduction='fast'",
                code="E_PIPELINE",
            )


def _single_use(model: nn.Module, graph: fx.Graph, parameter: nn.Parameter) -> str:
    """Return `table` or `product` for a parameter that a graph uses once, otherwise no text."""
    nodes = [node for node in graph.nodes if {parameter} & {*_parameters_of(model, node)}]
    if len(nodes) != 1 or (nodes[0].op == "get_attr" and len(nodes[0].users) != 1):
        return ""
    if nodes[0].op == "get_attr":
        return "product"
    kind = type(model.get_submodule(str(nodes[0].target)))
    return {nn.Embedding: "table", nn.Linear: "product"}.get(kind, "")


def balance(weights: Sequence[int], count: int) -> list[int]:
    """Return where parts 2 to `count` of a sequence of positive weights begin.

    The largest part is minimal, and then the sum of squares of parts. There are at least `count`
    weights.
    """
    # Dynamic programming over parts and ends: there are too many divisions to try all.
    sums = [0, *accumulate(weights)]

    @cache
    def best(parts: int, end: int) -> tuple[int, int, list[int]]:
        """Return largest part, sum of squares and starts for the first `end` weights."""
        if parts == 1:
            return sums[end], sums[end] ** 2, []
        choices = []
        for start in range(parts - 1, end):
            largest, squares, starts = best(parts - 1, start)
            last = sums[end] - sums[start]
            choices.append((max(largest, last), squares + last**2, [*starts, start]))
        return min(choices)

    return best(count, len(weights))[2]


def _balanced_starts(model: nn.Module, graph: fx.Graph, count: int) -> list[str]:
    """Return the first modules of stages 2 to `count`, stages balanced by number of parameters."""
    sizes = _module_sizes(model, graph)
    if len(sizes) < count:
        raise stage_error(
            f"{type(model).__name__} has {len(sizes)} modules at which a stage can begin, "
            f"for {count} stages",
            expected="a stage begins at a child of the model or an element of a sequence, and has "
            "parameters",
            fix=f"--mesh pipeline={max(1, len(sizes))}, or name nested modules: strategy.stages",
        )
    names = list(sizes)
    return [names[start] for start in balance(list(sizes.values()), count)]


def _module_sizes(model: nn.Module, graph: fx.Graph) -> dict[str, int]:
    """Return the number of parameters first used in each called module, if there are any."""
    seen: set[nn.Parameter] = set()
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        new = [parameter for parameter in _parameters_of(model, node) if parameter not in seen]
        # A shared weight counts where it is used first.
        seen.update(new)
        if node.op == "call_module" and new:
            sizes[str(node.target)] = sum(parameter.numel() for parameter in new)
    return sizes


def _opened(model: nn.Module, count: int) -> set[str]:
    """Return the modules to trace into: those that are larger than an average stage."""
    average = sum(parameter.numel() for parameter in model.parameters()) / count
    opened = set[str]()
    leaves = set[str]()
    # Again until nothing is large: an opened module can have large children.
    while True:
        sizes = _module_sizes(model, trace(model, opened, training=True))
        large = [name for name, size in sizes.items() if size > average and name not in leaves]
        if not large:
            return opened
        for name in large:
            children = list(model.get_submodule(name).children())
            if children and _can_open(model, opened | {name}):
                opened.add(name)
            else:
                leaves.add(name)


def _can_open(model: nn.Module, opened: set[str]) -> bool:
    try:
        # In both modes: a branch may exist in one of them only.
        graphs = [trace(model, opened, training=training) for training in (True, False)]
    except InputError:  # control flow depends on tensor values: the module remains a leaf
        return False
    calls = (node for graph in graphs for node in graph.nodes if node.op == "call_module")
    # A call of an opened module is one that the tracer could not look into.
    return all(node.target not in opened for node in calls)


def _parameters_of(model: nn.Module, node: fx.Node) -> list[nn.Parameter]:
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(model)
        if isinstance(value, nn.Parameter):
            return [value]
    return []


def _stage_of_nodes(graph: fx.Graph, starts: Sequence[str]) -> dict[fx.Node, int]:
    order = list(graph.nodes)
    positions = [_first_call(order, name) for name in starts]
    first = next(position for position, node in enumerate(order) if node.op == "call_module")
    if [first, *positions] != sorted({first, *positions}):
        raise stage_error(
            f"the stages begin at {', '.join(starts)}",
            expected="first modules of the second and further stages, in the order in which the "
            "forward calls them",
            fix=f"sort strategy.stages by this order, without {order[first].target}, the start of "
            "the first stage",
        )
    return {
        node: sum(position >= start for start in positions) for position, node in enumerate(order)
    }


def _first_call(order: Sequence[fx.Node], name: str) -> int:
    """Return the position of the first call of a module or of one of its descendants."""
    calls = [
        (number, str(node.target)) for number, node in enumerate(order) if node.op == "call_module"
    ]
    for position, target in calls:
        if target == name or target.startswith(f"{name}."):
            return position
    names = [target for _, target in calls]
    close = get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
    raise stage_error(
        f"strategy.stages: the forward never calls a module {name!r}",
        expected="names of modules that the forward calls",
        fix=f"use names such as {', '.join(close)}",
    )


def _stage_graphs(
    graph: fx.Graph, replicated: set[fx.Node], stages: dict[fx.Node, int], count: int
) -> list[fx.Graph]:
    nodes = [node for node in graph.nodes if node not in replicated]
    # A value passes through all stages from its own to the last that uses it.
    last_use = {}
    for node in nodes:
        uses = [stages[user] for user in node.users if user not in replicated]
        last_use[node] = max(uses, default=stages[node])
    crossing = [
        [n for n in nodes if stages[n] < stage <= last_use[n]] for stage in range(count + 1)
    ]
    return [
        _stage_graph(
            [n for n in nodes if stages[n] == stage],
            crossing[stage],
            crossing[stage + 1],
            replicated,
        )
        for stage in range(count)
    ]


def _replicated_nodes(model: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that every stage computes itself: functions of inputs and own tensors.

    For example masks and positions. Random functions and in-place changes are excluded. Functions
    of trained parameters too: one process applies their backward once, to the sum of the gradients
    of all stages.
    """
    replicated: set[fx.Node] = set()
    trained: set[fx.Node] = set()  # nodes with a gradient
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if isinstance(node.target, str):
            name = node.target
        is_function = node.op in ("call_function", "call_method")
        has_trained = any(used in trained for used in node.all_input_nodes)
        if is_function and name not in _PROPERTIES and has_trained:
            trained.add(node)
            continue
        if node.op == "get_attr" and any(one.requires_grad for one in _parameters_of(model, node)):
            trained.add(node)
        # Methods such as `add_`, and no operators such as `__add__`.
        is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        runs_once = is_in_place or any(word in name for word in _RANDOM)
        depends_on_inputs = is_function and all(used in replicated for used in node.all_input_nodes)
        if node.op in ("placeholder", "get_attr") or (depends_on_inputs and not runs_once):
            replicated.add(node)
    return replicated


def _stage_graph(
    nodes: Sequence[fx.Node],
    received: Sequence[fx.Node],
    sent: Sequence[fx.Node],
    replicated: set[fx.Node],
) -> fx.Graph:
    graph = fx.Graph()
    # First: a stage is called with received values before the inputs.
    copies = {node: graph.placeholder(f"received_{i}") for i, node in enumerate(received)}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "placeholder":
            copies[node] = graph.placeholder(f"input_{node.target}")
        elif node not in copies:
            assert node in replicated, f"{node} is computed in a stage that does not send it"
            copies[node] = graph.node_copy(node, copy_of)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    # The last stage has the output of the model.
    if not nodes or nodes[-1].op != "output":
        graph.output(tuple(copy_of(node) for node in sent))
    return graph
