"""Tests of step time and memory of layouts, from a calibration with simple numbers."""

from dataclasses import replace
from itertools import pairwise

import pytest

from samestep.config import Recipe
from samestep.recipes.recipe_files import load_recipe
from samestep.tools.plan.calibration import Calibration, LocalStep, ModelFacts, Stage, TensorPlan, interpolate
from samestep.tools.plan.collectives import Cluster, Link, ring_bytes
from samestep.tools.plan.layouts import Layout, find_layouts
from samestep.tools.plan.model import LayoutModel, bubble_share, bucket_sizes, gradient_sets
from samestep.tools.plan.scaling import Failures, scaling_curve

MB = 10**6
PARAMETERS, MICROBATCH, UPDATE = 80 * MB, 0.1, 0.01
LINK = Link(0.0, 1e-9)
FACTS = ModelFacts(
    parameters=PARAMETERS,
    gradients=(20 * MB,) * 4,
    buffers=0,
    optimizer=2 * PARAMETERS,
    activations=16 * MB,
    units=(20 * MB,) * 4,
    stages={
        2: (Stage(40 * MB, 0.5, MB), Stage(40 * MB, 0.5, 0)),
        4: tuple(Stage(20 * MB, 0.25, MB) for _ in range(4)),
    },
    tensor=TensorPlan(60 * MB, 0.8, (MB, MB), (MB,)),
)
CALIBRATION = Calibration(
    device="cuda",
    cores=None,
    base=0,
    steps={
        count: LocalStep(MICROBATCH * count + UPDATE, UPDATE, 3 * PARAMETERS + sets * PARAMETERS + 116 * MB)
        for count, sets in {1: 1, 2: 2, 4: 3, 8: 4}.items()
    },
    slowdown={1: 1.0},
    pairs={2: LINK},
    gathers={2: LINK},
    messages={2: LINK},
    copy_seconds=1e-10,
    deviation=0.0,
    facts=FACTS,
)


def model(devices: int, calibration: Calibration = CALIBRATION, nodes: int = 1) -> LayoutModel:
    return LayoutModel(calibration, Cluster(devices, nodes, calibration.pairs, LINK), True, 8)


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", [])


def layout(recipe: Recipe, devices: int, name: str) -> Layout:
    return next(layout for layout in find_layouts(recipe, devices)[0] if layout.shape.name == name)


@pytest.mark.parametrize(("stages", "microbatches", "share"), [(1, 8, 0), (4, 8, 3 / 11), (2, 1, 1 / 2)])
def test_bubble_of_equal_stages(stages: int, microbatches: int, share: float) -> None:
    assert bubble_share(stages, microbatches) == pytest.approx(share)


def test_pipeline_of_equal_stages_waits_for_that_share(recipe: Recipe) -> None:
    for devices in (2, 4):
        step = model(devices).step_time(layout(recipe, devices, "pp"))
        assert step.bubble / (step.bubble + step.compute) == pytest.approx(bubble_share(devices, 8))
        assert step.compute == pytest.approx(8 * MICROBATCH / devices)


@pytest.mark.parametrize(("microbatches", "exact", "fast"), [(1, 1, 1), (2, 2, 2), (4, 3, 2), (8, 4, 2), (5, 4, 2)])
def test_sets_of_gradients(microbatches: int, exact: int, fast: int) -> None:
    assert gradient_sets(microbatches, is_exact=True) == exact
    assert gradient_sets(microbatches, is_exact=False) == fast


def test_buckets_hold_gradients_in_reverse_order() -> None:
    assert bucket_sizes([10 * MB, 20 * MB, 30 * MB, 2 * MB]) == [2 * MB, 30 * MB, 30 * MB]
    assert sum(bucket_sizes([100] * 50)) == 5000


def test_step_of_one_device_is_the_measured_one(recipe: Recipe) -> None:
    step = model(1).step_time(layout(recipe, 1, "single"))
    assert step.total == pytest.approx(8 * MICROBATCH + UPDATE)
    assert step.communication == 0


def test_ddp_divides_microbatches_and_sends_the_bytes_of_a_ring(recipe: Recipe) -> None:
    # On a CPU without spare cores, messages and computation share the processors.
    busy = replace(CALIBRATION, device="cpu", cores=1, slowdown={1: 1.0, 2: 2.0, 4: 4.0})
    for devices in (2, 4):
        ddp = layout(recipe, devices, "ddp")
        step = model(devices).step_time(ddp)
        assert step.compute == pytest.approx(8 * MICROBATCH / devices)
        assert model(devices).sent_bytes(ddp) == ring_bytes(devices, PARAMETERS)
        step = model(devices, busy).step_time(ddp)
        assert step.compute == pytest.approx(8 * MICROBATCH)
        assert step.communication == pytest.approx(1e-9 * ring_bytes(devices, PARAMETERS), rel=1e-3)


def test_backward_hides_messages_on_a_device_of_its_own(recipe: Recipe) -> None:
    ddp = layout(recipe, 2, "ddp")
    hidden = model(2).step_time(ddp).communication
    assert hidden == pytest.approx(1e-9 * 20 * MB, rel=1e-3)  # the last of three buckets, at the end of backward


def test_memory_of_ddp_is_the_measured_one_and_of_fsdp_less(recipe: Recipe) -> None:
    single = model(1).memory(layout(recipe, 1, "single"))
    assert single.total == CALIBRATION.steps[8].peak
    ddp = model(4).memory(layout(recipe, 4, "ddp"))
    fsdp = model(4).memory(layout(recipe, 4, "fsdp"))
    assert fsdp.optimizer == ddp.optimizer / 4
    assert fsdp.parameters == PARAMETERS / 4 + 2 * 20 * MB
    assert fsdp.total < ddp.total
    stage = model(4).memory(layout(recipe, 4, "pp"))
    assert (stage.parameters, stage.optimizer) == (PARAMETERS / 4, PARAMETERS / 2)
    assert stage.activations == FACTS.activations  # four microbatches of a quarter of the model


def test_tensor_axis_divides_its_products_only(recipe: Recipe) -> None:
    step, memory = (getattr(model(2), name)(layout(recipe, 2, "tp")) for name in ("step_time", "memory"))
    assert step.compute == pytest.approx(8 * MICROBATCH * (1 - 0.8 / 2))
    assert memory.parameters == 50 * MB
    assert step.communication > 0


def test_fsdp_gathers_for_each_microbatch(recipe: Recipe) -> None:
    fsdp = layout(recipe, 4, "fsdp")
    assert model(4).sent_bytes(fsdp) == (2 * 2 + 1) * 3 / 4 * PARAMETERS
    assert model(4).step_time(fsdp).communication > model(4).step_time(layout(recipe, 4, "ddp")).communication


def test_slow_link_between_nodes_makes_messages_slower(recipe: Recipe) -> None:
    slow = LayoutModel(CALIBRATION, Cluster(4, 2, CALIBRATION.pairs, Link(0.0, 1e-7)), True, 8)
    ddp = layout(recipe, 4, "ddp")
    assert slow.step_time(ddp).communication > 10 * model(4).step_time(ddp).communication


def test_more_ranks_than_cores_share_them() -> None:
    busy = replace(CALIBRATION, cores=2, slowdown={1: 1.0, 2: 1.1, 4: 2.2})
    assert [busy.slowdown_of(ranks) for ranks in (1, 2, 4, 8)] == pytest.approx([1.0, 1.1, 2.2, 4.4])
    assert CALIBRATION.slowdown_of(8) == 1.0


def test_interpolation() -> None:
    assert interpolate({1: 1.0, 4: 4.0}, 2) == 2.0
    assert interpolate({1: 1.0, 4: 4.0}, 8) == 8.0
    assert interpolate({2: 3.0}, 8) == 3.0


def test_curve_grows_with_devices_and_loses_time_to_failures(recipe: Recipe) -> None:
    ddp = layout(recipe, 4, "ddp")
    points = scaling_curve(model(4), ddp, recipe, Failures(device_hours=50_000, restart=120))
    assert [point.devices for point in points] == [2**power for power in range(14)]
    assert points[0].efficiency == 1
    for before, after in pairwise(points):
        assert after.samples_per_second > before.samples_per_second
        assert after.useful < before.useful
        assert after.checkpoint_interval < before.checkpoint_interval
        assert after.mtbf == pytest.approx(before.mtbf / 2)
    assert [point.fixed_batch is not None for point in points] == [point.devices <= 8 for point in points]
    assert points[2].nodes == 1
    assert points[-1].nodes == 2048
    # Without waits for a slowest rank, the point of the plan is the plan itself.
    assert points[2].step_seconds == pytest.approx(model(4).step_time(ddp).total)


@pytest.mark.parametrize(("devices", "name"), [(3, "ddp"), (4, "ddp"), (6, "ddp x pp"), (6, "hsdp")])
def test_curve_has_the_measured_step_of_the_plan(recipe: Recipe, devices: int, name: str) -> None:
    planned = layout(recipe, devices, name)
    measured = replace(CALIBRATION, measured={planned.name: 0.5})
    points = scaling_curve(model(devices, measured), planned, recipe, Failures(device_hours=50_000, restart=120))
    assert [point.step_seconds for point in points if point.devices == devices] == [pytest.approx(0.5)]
    plain = scaling_curve(model(devices), planned, recipe, Failures(device_hours=50_000, restart=120))
    assert points[-1].step_seconds > plain[-1].step_seconds
    numbers = [point.devices for point in points]
    assert numbers == sorted(numbers)
    assert max(numbers) <= 8192
