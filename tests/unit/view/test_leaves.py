"""Leaves of outputs: which objects are opened, and that they are rebuilt as they were."""

from __future__ import annotations

import dataclasses
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from samestep.view.leaves import flatten, is_held_elsewhere


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None
    created: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.created += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: list[Tensor]
    name: str


@dataclasses.dataclass(slots=True)
class Slotted:
    values: Tensor


class Pair:
    __slots__ = ("first", "second")

    def __init__(self, first: Any) -> None:
        self.first = first


class Bag(dict[str, Any]):
    pass


def x() -> Tensor:
    return torch.arange(6.0).view(3, 2)


def rebuilt(value: Any) -> Any:
    leaves, spec = flatten(value)
    assert all(isinstance(leaf, Tensor | bool | int | str | type | None) for leaf in leaves)
    result = tree_unflatten([leaf + 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    assert flatten(result)[1] == spec
    assert type(result) is type(value)
    return result


def test_values_that_torch_opens() -> None:
    value = {"a": x(), "b": (1, [None, x()])}
    leaves, spec = flatten(value)
    assert leaves[1:3] == [1, None]
    assert spec == tree_flatten(value)[1]


def test_dataclass() -> None:
    result = rebuilt(Output(x()))
    assert torch.equal(result.loss, x() + 1)
    assert (result.logits, result.created) == (None, 1)
    result = rebuilt(Frozen([x(), x()], "name"))
    assert torch.equal(result.values[1], x() + 1)
    assert result.name == "name"


def test_size_stays_a_size() -> None:
    assert isinstance(rebuilt(Output(x(), torch.Size([3, 2]))).logits, torch.Size)  # type: ignore[arg-type]
    assert isinstance(rebuilt([torch.Size([])])[0], torch.Size)


@pytest.mark.parametrize(
    "value",
    [
        distributions.Categorical(logits=x()),
        distributions.Bernoulli(probs=x() / 10),
        distributions.Independent(distributions.Normal(x(), x().exp()), 1),
        distributions.MultivariateNormal(x(), torch.eye(2)),
        distributions.MixtureSameFamily(distributions.Categorical(logits=x()), distributions.Normal(x(), x().exp())),
        distributions.TransformedDistribution(distributions.Normal(x(), x().exp()), [distributions.TanhTransform()]),
        distributions.Dirichlet(x().exp()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_distribution(value: Any) -> None:
    leaves, spec = flatten(value)
    result = tree_unflatten(leaves, spec)
    torch.manual_seed(0)
    expected = value.sample()
    torch.manual_seed(0)
    assert torch.equal(result.sample(), expected)
    assert result.batch_shape == value.batch_shape
    assert isinstance(result.batch_shape, torch.Size)


def test_packed_sequence() -> None:
    value = pack_padded_sequence(x().unsqueeze(-1), torch.tensor([2, 2, 1]), batch_first=True)
    assert type(rebuilt(value)) is type(value)


class Deleting:
    """Object with a consequence at its end, as that of a copy would have."""

    def __init__(self) -> None:
        self.name = "file"

    def __del__(self) -> None:
        pass


class Loop:
    """Object that refers to itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize(
    "value",
    [
        *(nn.Linear(1, 1), threading.Lock(), ValueError("x"), iter([1]), flatten, torch.Generator()),
        *(Loop(), Deleting(), Pair(x()), Slotted(x()), Bag(a=x()), types.SimpleNamespace(a=x())),
        *(Output(threading.Lock()), [Output(nn.Linear(1, 1))]),  # type: ignore[arg-type]
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_are_leaves(value: Any) -> None:
    leaves = flatten(value)[0]
    assert not all(isinstance(leaf, Tensor | int | str | type | None) for leaf in leaves)


def test_object_in_several_places() -> None:
    output = Output(x())
    leaves = flatten([output, output])[0]
    assert leaves[-1] is output


def test_object_that_is_held_elsewhere() -> None:
    assert not is_held_elsewhere([Output(x()), {"a": Output([Output(x())])}])  # type: ignore[arg-type]
    assert not is_held_elsewhere([x(), 1])
    output = Output(x())
    holder = {"kept": output}
    assert is_held_elsewhere([output])
    holder.clear()
    assert not is_held_elsewhere([output])
    inner = Output(x())
    module = nn.Identity()
    module.kept = [inner]
    assert is_held_elsewhere({"output": Output(inner)})  # type: ignore[arg-type]


def test_object_with_a_weak_reference() -> None:
    output = Output(Output(x()))  # type: ignore[arg-type]
    assert not is_held_elsewhere([output])
    reference = weakref.ref(output.loss)
    assert is_held_elsewhere([output])
    del reference


def test_cache_of_a_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.ones(3, 2, 4, 5), torch.ones(3, 2, 4, 5), 0)
    leaves, spec = flatten(cache)
    result = tree_unflatten(leaves, spec)
    assert type(result) is type(cache)
    assert result.get_seq_length() == 4
    result.update(torch.ones(3, 2, 1, 5), torch.ones(3, 2, 1, 5), 0)
    assert (result.get_seq_length(), cache.get_seq_length()) == (5, 4)
