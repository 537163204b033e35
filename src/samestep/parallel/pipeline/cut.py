"""Where a model is cut into stages, and what each stage computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain

from torch import fx, nn

from samestep.errors import InputError
from samestep.parallel.pipeline.trace import trace

# Functions that must run once only, by what is in their names.
_DRAWS = ("dropout", "rand", "bernoulli", "multinomial", "normal")
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "setitem")


@dataclass(frozen=True)
class StageGraph:
    """What one stage computes.

    Attributes:
        graph: its first placeholders are what the stage before it hands on, those after are inputs of the model.
        inputs: names of these.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """A model in stages.

    Attributes:
        graphs: of each stage, by whether it trains.
        homes: for the name of each parameter, the stages that use it, in order.
        modules: for the name of each module that is called, its stage.
    """

    graphs: dict[bool, list[StageGraph]]
    homes: dict[str, tuple[int, ...]]
    modules: dict[str, int]

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.graphs[True])


def cut(model: nn.Module, names: Sequence[str], count: int) -> Cut:
    """Cut `model` into stages.

    Args:
        names: the modules with which the second and further stages begin; none for `count` stages whose largest has as
            few parameters as can be.

    Raises:
        InputError: the model cannot be cut so.
    """
    opened = _above(names) if names else _opened(model, count)
    traces = {training: trace(model, opened, training=training) for training in (True, False)}
    starts = list(names) or balanced(model, traces[True], count)
    graphs = {training: _graphs(graph, _stages(graph, starts), len(starts) + 1) for training, graph in traces.items()}
    users: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in model.parameters()}
    modules: dict[str, int] = {}
    for stage, node in chain(*(_numbered(stages) for stages in graphs.values())):
        for parameter in parameters_at(model, node):
            users[parameter].add(stage)
        if node.op == "call_module":
            _require_one_stage(model, str(node.target), modules.setdefault(str(node.target), stage), stage)
    homes = {name: tuple(sorted(users[parameter])) or (0,) for name, parameter in model.named_parameters()}
    return Cut(graphs, homes, modules)


def _numbered(stages: Sequence[StageGraph]) -> Iterator[tuple[int, fx.Node]]:
    return ((stage, node) for stage, one in enumerate(stages) for node in one.graph.nodes)


def balanced(model: nn.Module, graph: fx.Graph, count: int) -> list[str]:
    """The modules at which further stages begin, so that the largest of `count` stages has as few parameters as can be.

    Raises:
        InputError: there are not so many modules that have parameters.
    """
    sizes = _sizes(model, graph)
    if len(sizes) < count:
        raise InputError(
            f"{type(model).__name__} has {len(sizes)} modules at which a stage can begin, for {count} stages",
            rule="stages begin at a child of the model or an element of a sequence, and each has parameters",
            do=f"--mesh pipeline={max(1, len(sizes))}, or name deeper modules: strategy.stages",
        )
    names, weights = list(sizes), list(sizes.values())
    return [names[i] for i in _partition(weights, count)]


def _sizes(model: nn.Module, graph: fx.Graph) -> dict[str, int]:
    """For each module that is called, how many parameters are used there first; those without any left out."""
    seen: set[nn.Parameter] = set()
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        new = [parameter for parameter in parameters_at(model, node) if parameter not in seen]
        seen.update(new)
        if node.op == "call_module" and new:
            sizes[str(node.target)] = sum(parameter.numel() for parameter in new)
    return sizes


def _above(names: Sequence[str]) -> set[str]:
    """The modules around those of some names."""
    parts = [name.split(".") for name in names]
    return {".".join(path[:depth]) for path in parts for depth in range(1, len(path))}


def _opened(model: nn.Module, count: int) -> set[str]:
    """The modules that are larger than a stage should be, and can be looked into."""
    share = sum(parameter.numel() for parameter in model.parameters()) / count
    opened, whole = set[str](), set[str]()
    while True:
        sizes = _sizes(model, trace(model, opened, training=True))
        large = [name for name, size in sizes.items() if size > share and name not in whole]
        if not large:
            return opened
        for name in large:
            can = any(True for _ in model.get_submodule(name).children()) and _can_open(model, opened | {name})
            (opened if can else whole).add(name)


def _can_open(model: nn.Module, opened: set[str]) -> bool:
    try:
        found = [trace(model, opened, training=training) for training in (True, False)]
    except InputError:  # what it does depends on values: it stays one thing
        return False
    return all(node.target not in opened for graph in found for node in graph.nodes if node.op == "call_module")


def _partition(weights: Sequence[int], count: int) -> list[int]:
    """Where parts 1, 2, ... of `count` begin: least largest part first, then least sum of squares."""
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # For each number of parts and of elements in them: largest part, sum of squares, beginnings.
    best = {(1, end): (sums[end], sums[end] ** 2, list[int]()) for end in range(1, len(sums))}
    for parts in range(2, count + 1):
        for end in range(parts, len(sums)):
            choices = []
            for begin in range(parts - 1, end):
                most, squares, found = best[parts - 1, begin]
                last = sums[end] - sums[begin]
                choices.append((max(most, last), squares + last**2, [*found, begin]))
            best[parts, end] = min(choices)
    return best[count, len(weights)][2]


def parameters_at(model: nn.Module, node: fx.Node) -> list[nn.Parameter]:
    """The parameters that a node of a forward uses."""
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        value = getattr(model.get_submodule(path), name)
        return [value] if isinstance(value, nn.Parameter) else []
    return []


def _stages(graph: fx.Graph, starts: Sequence[str]) -> dict[fx.Node, int]:
    """The stage of each node."""
    order = list(graph.nodes)
    begins = [_first(order, name) for name in starts]
    first = next(position for position, node in enumerate(order) if node.op == "call_module")
    if [first, *begins] != sorted({first, *begins}):
        raise InputError(
            f"the stages begin at {', '.join(starts)}",
            rule="the second stage and those after it, in the order in which the forward calls the modules",
            do=f"put strategy.stages in that order, without {order[first].target}, with which the first one begins",
        )
    return {node: sum(position >= begin for begin in begins) for position, node in enumerate(order)}


def _first(order: Sequence[fx.Node], name: str) -> int:
    """The position of the first call of a module, or of one inside of it."""
    called = [str(node.target) if node.op == "call_module" else "" for node in order]
    for position, target in enumerate(called):
        if target == name or target.startswith(f"{name}."):
            return position
    close = get_close_matches(name, [target for target in called if target], n=3, cutoff=0.3)
    raise InputError(
        f"strategy.stages: the forward never calls a module {name!r}",
        rule="names of modules that the forward calls",
        do=f"names like {', '.join(close) or ', '.join(filter(None, called[:3]))}",
    )


def _require_one_stage(model: nn.Module, name: str, first: int, stage: int) -> None:
    if stage != first and any(True for _ in model.get_submodule(name).buffers()):
        raise InputError(
            f"the module {name!r}, which has buffers, is used in stages {first + 1} and {stage + 1}",
            rule="what keeps statistics lives in one stage",
            do="let strategy.stages begin elsewhere",
        )


def _graphs(graph: fx.Graph, stages: dict[fx.Node, int], count: int) -> list[StageGraph]:
    free = _free(graph)
    bound = [node for node in graph.nodes if node not in free]
    last = {node: max((stages[user] for user in _bound_users(node, free)), default=stages[node]) for node in bound}
    crossing = [[n for n in bound if stages[n] < stage <= last[n]] for stage in range(count + 1)]
    return [
        _graph([n for n in bound if stages[n] == stage], crossing[stage], crossing[stage + 1], free)
        for stage in range(count)
    ]


def _free(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that follow from the model's inputs and own tensors by functions alone: every stage makes its own.

    Masks, positions, expanded parameters. Not what draws, and not what changes a tensor in place.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        once = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or any(w in name for w in _DRAWS)
        follows = node.op in ("call_function", "call_method") and all(n in found for n in node.all_input_nodes)
        if node.op in ("placeholder", "get_attr") or (follows and not once):
            found.add(node)
    return found


def _bound_users(node: fx.Node, free: set[fx.Node]) -> list[fx.Node]:
    return [user for user in node.users if user not in free]


def _graph(
    members: Sequence[fx.Node], arriving: Sequence[fx.Node], leaving: Sequence[fx.Node], free: set[fx.Node]
) -> StageGraph:
    new = fx.Graph()
    made = {node: new.placeholder(f"arriving_{i}") for i, node in enumerate(arriving)}
    inputs: list[str] = []

    def value(node: fx.Node) -> fx.Node:
        if node not in made and node.op == "placeholder":
            inputs.append(str(node.target))
            made[node] = new.placeholder(f"input_{node.target}")
        elif node not in made:
            assert node in free, f"{node} comes from a stage that does not hand it on"
            made[node] = new.node_copy(node, value)
        return made[node]

    for node in members:
        made[node] = new.node_copy(node, value)
    if not members or members[-1].op != "output":
        new.output(tuple(value(node) for node in leaving))
    return StageGraph(new, tuple(inputs))
