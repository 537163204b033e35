"""Computes a graph with the modules and tensors that a model has now."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch import fx, nn


class Computer:
    """What `fx.Interpreter` is for, node by node, with a value dropped after its last use."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._model, self._nodes = model, list(graph.nodes)
        last = {used: node for node in self._nodes for used in node.all_input_nodes}
        self._done: dict[fx.Node, list[fx.Node]] = {}
        for used, node in last.items():
            self._done.setdefault(node, []).append(used)

    def __call__(self, *arguments: Any) -> Any:
        """What the graph makes of the values of its placeholders, in order."""
        given, values = iter(arguments), dict[fx.Node, Any]()
        for node in self._nodes:
            values[node] = self._value(node, values, given)
            for used in self._done.get(node, ()):
                del values[used]
        return values[self._nodes[-1]]

    def _value(self, node: fx.Node, values: dict[fx.Node, Any], given: Iterator[Any]) -> Any:
        if node.op == "placeholder":
            return next(given)
        name = str(node.target)
        if node.op == "get_attr":
            return attrgetter(name)(self._model)
        arguments, options = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return arguments[0]
        if node.op == "call_method":
            return getattr(arguments[0], name)(*arguments[1:], **options)
        function: Any = self._model.get_submodule(name) if node.op == "call_module" else node.target
        return function(*arguments, **options)
