"""Mesh shapes of strategies, and errors that suggest a valid mesh."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.config import MeshConfig, MeshShape, StrategyConfig, resolve_mesh
from samestep.config.strategy import AXES, StrategyName
from samestep.errors import InputError, RecipeError

NAMES = ("auto", "ddp", "fsdp", "hsdp", "device_map", "tp", "pp")
sizes = st.none() | st.integers(1, 4)
meshes = st.builds(MeshConfig, pipeline=sizes, replicate=sizes, shard=sizes, tensor=sizes)


def resolved(name: StrategyName, processes: int, **mesh: int) -> MeshShape:
    return resolve_mesh(StrategyConfig(name=name, mesh=MeshConfig(**mesh)), processes)


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
        ("hsdp", 4, {"shard": 2}, ("hsdp", 1, 2, 2, 1)),
        ("hsdp", 4, {"replicate": 2, "shard": 2}, ("hsdp", 1, 2, 2, 1)),
        ("pp", 4, {"pipeline": 2}, ("ddp x pp", 2, 2, 1, 1)),
        ("ddp", 8, {"pipeline": 2, "tensor": 2}, ("ddp x pp x tp", 2, 2, 1, 2)),
        ("pp", 4, {"pipeline": 2, "replicate": 1, "tensor": 2}, ("pp x tp", 2, 1, 1, 2)),
        ("device_map", 2, {}, ("ddp x device_map", 1, 2, 1, 1)),
    ],
)
def test_mesh_shape_of_a_strategy(
    name: StrategyName, processes: int, mesh: dict[str, int], expected: tuple[object, ...]
) -> None:
    shape = resolved(name, processes, **mesh)
    assert (shape.name, *shape.sizes) == expected


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_shards_have_no_tensor_axis(name: StrategyName) -> None:
    with pytest.raises(InputError, match=f"strategy {name} with the mesh shard=2,tensor=2 on 4 ranks") as caught:
        resolved(name, 4, shard=2, tensor=2)
    assert caught.value.code == "E_MESH"


@given(name=st.sampled_from(NAMES), mesh=meshes, processes=st.integers(1, 12))
def test_sizes_multiply_to_the_number_of_ranks_or_the_error_suggests_a_valid_mesh(
    name: StrategyName, mesh: MeshConfig, processes: int
) -> None:
    try:
        shape = resolve_mesh(StrategyConfig(name=name, mesh=mesh), processes)
    except InputError as error:
        assert error.expected
        assert error.fix
        # The suggested mesh is valid.
        axis, size = str(error.fix).removeprefix("--mesh ").split("=")
        assert resolved(name, processes, **{axis: int(size)}).size == processes
        return
    assert math.prod(shape.sizes) == shape.size == processes
    assert {axis: getattr(shape, axis) for axis in mesh.sizes} == mesh.sizes
    assert shape.data_size * shape.pipeline * shape.tensor == processes


@given(sizes=st.tuples(*[st.integers(1, 4)] * 4))
def test_coordinates_are_unique_and_neighbours_share_a_tensor_group(sizes: tuple[int, int, int, int]) -> None:
    shape = MeshShape("any", *sizes)
    coordinates = [shape.coordinates(rank) for rank in range(shape.size)]
    assert len({tuple(rank.items()) for rank in coordinates}) == shape.size
    assert [rank["tensor"] for rank in coordinates[: shape.tensor]] == list(range(shape.tensor))
    assert all(0 <= rank[axis] < getattr(shape, axis) for rank in coordinates for axis in AXES)


def test_more_data_ranks_than_microbatches_is_an_error() -> None:
    strategy = StrategyConfig(name="ddp", mesh=MeshConfig(tensor=2))
    assert resolve_mesh(strategy, 8, microbatches=4).data_size == 4
    with pytest.raises(InputError, match="6 ranks share the data but there are 4 microbatches") as caught:
        resolve_mesh(strategy, 12, microbatches=4)
    assert caught.value.code == "E_TOO_MANY_RANKS"
    assert str(caught.value.fix).startswith("--processes 8;")


@pytest.mark.parametrize(
    ("strategy", "processes", "error"),
    [
        (StrategyConfig(name="ddp", offload=True), 2, "strategy.offload without a shard axis"),
        (StrategyConfig(name="ddp", gather="bf16"), 2, "strategy.gather without a shard axis"),
        (StrategyConfig(name="tp", stages=("b",)), 2, "strategy.stages without a pipeline axis"),
        (StrategyConfig(name="fsdp", hook="fp16"), 2, "strategy.hook with strategy.name fsdp"),
        (StrategyConfig(name="ddp", devices=2), 2, "strategy.devices with strategy.name ddp"),
    ],
)
def test_option_without_an_effect_is_an_error(strategy: StrategyConfig, processes: int, error: str) -> None:
    with pytest.raises(InputError, match=error) as caught:
        resolve_mesh(strategy, processes)
    assert caught.value.code == "E_STRATEGY"


@pytest.mark.parametrize("values", [{"name": "zero"}, {"gather": "fp8"}, {"hook": "int8"}, {"devices": 0}])
def test_invalid_value_is_an_error_with_the_key(values: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=rf"strategy\.{next(iter(values))} is"):
        StrategyConfig(**values)  # type: ignore[arg-type]
