"""Layouts are what their strategies say, and what cannot be is refused with one that can."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.config import Layout, Mesh, StrategyPart, settle
from samestep.config.layout import AXES
from samestep.config.strategy import StrategyName
from samestep.errors import InputError, RecipeError

NAMES = ("auto", "ddp", "dp", "fsdp", "hsdp", "placed", "tp", "pp")
sizes = st.none() | st.integers(1, 4)
meshes = st.builds(Mesh, pipeline=sizes, replicate=sizes, shard=sizes, tensor=sizes)


def settled(name: StrategyName, processes: int, **mesh: int) -> Layout:
    return settle(StrategyPart(name=name, mesh=Mesh(**mesh)), processes)


@pytest.mark.parametrize(
    ("name", "processes", "mesh", "expected"),
    [
        ("auto", 1, {}, ("single", 1, 1, 1, 1)),
        ("auto", 3, {}, ("ddp", 1, 3, 1, 1)),
        ("ddp", 4, {"tensor": 2}, ("ddp x tp", 1, 2, 1, 2)),
        ("tp", 4, {}, ("tp", 1, 1, 1, 4)),
        ("tp", 4, {"tensor": 2}, ("ddp x tp", 1, 2, 1, 2)),
        ("fsdp", 3, {}, ("fsdp", 1, 1, 3, 1)),
        ("fsdp", 1, {}, ("single", 1, 1, 1, 1)),
        ("fsdp", 4, {"tensor": 2}, ("fsdp x tp", 1, 1, 2, 2)),
        ("hsdp", 4, {"shard": 2}, ("hsdp", 1, 2, 2, 1)),
        ("hsdp", 4, {"replicate": 2, "shard": 2}, ("hsdp", 1, 2, 2, 1)),
        ("pp", 4, {"pipeline": 2}, ("ddp x pp", 2, 2, 1, 1)),
        ("ddp", 8, {"pipeline": 2, "tensor": 2}, ("ddp x pp x tp", 2, 2, 1, 2)),
        ("pp", 4, {"pipeline": 2, "replicate": 1, "tensor": 2}, ("pp x tp", 2, 1, 1, 2)),
        ("placed", 2, {}, ("ddp x placed", 1, 2, 1, 1)),
        ("dp", 1, {}, ("dp", 1, 1, 1, 1)),
    ],
)
def test_a_strategy_has_its_layout(
    name: StrategyName, processes: int, mesh: dict[str, int], expected: tuple[object, ...]
) -> None:
    found = settled(name, processes, **mesh)
    assert (found.name, *found.sizes) == expected


@given(name=st.sampled_from(NAMES), mesh=meshes, processes=st.integers(1, 12))
def test_sizes_multiply_to_the_number_of_ranks_or_a_way_out_is_named(
    name: StrategyName, mesh: Mesh, processes: int
) -> None:
    try:
        layout = settle(StrategyPart(name=name, mesh=mesh), processes)
    except InputError as error:
        assert error.rule
        assert error.do
        _require_a_way_out(name, mesh, processes, str(error.do))
        return
    assert math.prod(layout.sizes) == layout.size == processes
    assert {axis: getattr(layout, axis) for axis in mesh.given} == mesh.given
    assert layout.data * layout.pipeline * layout.tensor == processes


def _require_a_way_out(name: StrategyName, mesh: Mesh, processes: int, do: str) -> None:
    """What is advised is accepted."""
    other, sizes = (re.search(pattern, do) for pattern in (r"--strategy (\w+)", r"--mesh ([\w=,]+)"))
    if other or sizes:
        said = [each.split("=") for each in sizes[1].split(",")] if sizes else []
        advised = Mesh(**{axis: int(size) for axis, size in said}) if sizes else mesh
        part = StrategyPart(name=other[1] if other else name, mesh=advised)  # type: ignore[arg-type]
        assert settle(part, processes).size == processes
    if found := re.search(r"--processes (\d+)", do):
        assert settle(StrategyPart(name=name, mesh=mesh), int(found[1])).size == int(found[1])


@given(sizes=st.tuples(*[st.integers(1, 4)] * 4))
def test_every_rank_has_a_place_of_its_own(sizes: tuple[int, int, int, int]) -> None:
    layout = Layout("any", *sizes)
    places = [tuple(layout.place(rank).items()) for rank in range(layout.size)]
    assert len(set(places)) == layout.size
    # Neighbours are of one tensor group: what communicates most goes over the fastest links.
    assert [dict(place)["tensor"] for place in places[: layout.tensor]] == list(range(layout.tensor))
    assert all(0 <= dict(place)[axis] < getattr(layout, axis) for place in places for axis in AXES)


def test_the_picture_says_who_holds_what() -> None:
    assert settled("hsdp", 4, shard=2).picture().splitlines() == [
        "layout hsdp: replicate 2 x shard 2",
        "  rank 0: data 1 of 4, part 1 of 2",
        "  rank 1: data 2 of 4, part 2 of 2",
        "  rank 2: data 3 of 4, part 1 of 2",
        "  rank 3: data 4 of 4, part 2 of 2",
    ]
    assert settled("ddp", 4, tensor=2).picture().splitlines()[1:] == [
        "  rank 0: data 1 of 2, slice 1 of 2",
        "  rank 1: data 1 of 2, slice 2 of 2",
        "  rank 2: data 2 of 2, slice 1 of 2",
        "  rank 3: data 2 of 2, slice 2 of 2",
    ]
    assert "the whole model" in settled("ddp", 2).picture()


def test_ranks_that_share_the_data_are_no_more_than_shards() -> None:
    part = StrategyPart(name="ddp", mesh=Mesh(tensor=2))
    assert settle(part, 8, shards=4).data == 4
    with pytest.raises(InputError, match="6 ranks share the data but the recipe has 4 shards") as error:
        settle(part, 12, shards=4)
    assert str(error.value.do).startswith("--processes 8, or set shards: 6")


@pytest.mark.parametrize(
    ("part", "processes", "said"),
    [
        (StrategyPart(name="ddp", offload=True), 2, "strategy.offload without a shard axis"),
        (StrategyPart(name="ddp", gather="bf16"), 2, "strategy.gather without a shard axis"),
        (StrategyPart(name="ddp", bucket_mb=1, mesh=Mesh(tensor=2)), 2, "strategy.bucket_mb with the layout tp"),
        (StrategyPart(name="ddp", bucket_mb=1, mesh=Mesh(tensor=2)), 2, "strategy.bucket_mb with the layout tp"),
        (StrategyPart(name="fsdp", meta=True, mesh=Mesh(tensor=2)), 4, "strategy.meta with the layout fsdp x tp"),
        (StrategyPart(name="fsdp", plan={"a": "column"}), 2, "strategy.plan without a tensor axis"),
        (StrategyPart(name="tp", stages=("b",)), 2, "strategy.stages without a pipeline axis"),
        (StrategyPart(name="tp", schedule="gpipe"), 2, "strategy.schedule without a pipeline axis"),
        (StrategyPart(name="fsdp", hook="fp16"), 2, "strategy.hook with strategy.name fsdp"),
        (StrategyPart(name="pp", bucket_mb=1.0), 2, "strategy.bucket_mb with strategy.name pp"),
        (StrategyPart(name="ddp", devices=2), 2, "strategy.devices with strategy.name ddp"),
        (StrategyPart(name="dp", place={"a": 0}), 1, "strategy.place with strategy.name dp"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(part: StrategyPart, processes: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        settle(part, processes)


@pytest.mark.parametrize(
    "values",
    [{"name": "zero"}, {"gather": "fp8"}, {"hook": "int8"}, {"schedule": "2f2b"}, {"bucket_mb": 0.0}, {"devices": 0}],
)
def test_a_word_that_is_none_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=r"strategy\."):
        StrategyPart(**values)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"strategy\.mesh\.tensor is 0"):
        Mesh(tensor=0)
