"""Scaling curve: samples per second of a layout from one device to thousands, with failures and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from samestep.config import MeshConfig, Recipe
from samestep.config.strategy import MeshShape
from samestep.tools.plan.checkpoint_interval import daly_interval, useful_share
from samestep.tools.plan.collectives import Cluster
from samestep.tools.plan.layouts import Layout
from samestep.tools.plan.model import LayoutModel

_LARGEST = 8192  # devices of the curve, at least


@dataclass(frozen=True)
class Failures:
    """Failures of a job.

    Attributes:
        device_hours: mean hours between failures of one device.
        restart: seconds from a failure to the next step.
    """

    device_hours: float
    restart: float


@dataclass(frozen=True)
class Point:
    """Point of the curve.

    Attributes:
        devices: number of devices.
        nodes: number of nodes.
        batch_size: global batch, which grows with the ranks that share the data.
        step_seconds: time of a step, with the wait for the slowest rank.
        samples_per_second: without failures.
        efficiency: samples per second and device, relative to the smallest number of devices.
        fixed_batch: samples per second with the global batch of the recipe; None with too few microbatches.
        mtbf: seconds between failures of the job.
        checkpoint_interval: seconds between checkpoints with the least lost time.
        useful: share of time without checkpoints, lost work and restarts.
    """

    devices: int
    nodes: int
    batch_size: int
    step_seconds: float
    samples_per_second: float
    efficiency: float
    fixed_batch: float | None
    mtbf: float
    checkpoint_interval: float
    useful: float


def scaling_curve(model: LayoutModel, layout: Layout, recipe: Recipe, failures: Failures) -> list[Point]:
    """Return the curve of a layout: copies of the model grow, the other axes stay as they are.

    The microbatches of a rank and their size stay too, so the global batch grows with the devices. A measured step of
    the layout corrects the predictions of all points.
    """
    points: list[Point] = []
    correction = model.correction(layout)
    smallest = layout.shape.size // layout.shape.replicate
    for copies in _copies(smallest, layout.shape.replicate):
        devices = smallest * copies
        wide = _with_copies(layout, copies)
        at_size = replace(model, cluster=_cluster_of(model.cluster, devices))
        samples = recipe.batch_size / recipe.microbatch_count * layout.microbatches * wide.shape.data_size
        slowest = _slowest_factor(model.calibration.deviation, devices, model.cluster.devices_per_node) * correction
        seconds = at_size.step_time(wide).total * slowest
        rate = samples / seconds
        first = points[0] if points else None
        fixed = None
        if wide.shape.data_size <= recipe.microbatch_count:
            count = -(-recipe.microbatch_count // wide.shape.data_size)
            fixed = recipe.batch_size / slowest / at_size.step_time(replace(wide, microbatches=count)).total
        mtbf = failures.device_hours * 3600 / devices
        memory = model.memory(wide)
        stall = max(1e-3, (memory.parameters + memory.optimizer) * model.calibration.copy_seconds)
        interval = daly_interval(stall, mtbf)
        points.append(
            Point(
                devices,
                at_size.cluster.nodes,
                round(samples),
                seconds,
                rate,
                rate / devices / (first.samples_per_second / first.devices) if first else 1.0,
                fixed,
                mtbf,
                interval,
                useful_share(interval, stall, failures.restart, mtbf),
            )
        )
    return points


def _copies(smallest: int, planned: int) -> list[int]:
    """Return the planned number of copies of the model, and powers of two."""
    largest = max(_LARGEST // smallest, planned)
    return sorted({planned, *(2**power for power in range(largest.bit_length()))})


def _with_copies(layout: Layout, copies: int) -> Layout:
    shape = replace(layout.shape, replicate=copies)
    sizes = {axis: size for axis, size in vars(layout.strategy.mesh).items() if size is not None}
    strategy = replace(layout.strategy, mesh=MeshConfig(**{**sizes, "replicate": copies}))
    return replace(layout, shape=_named(shape), strategy=strategy)


def _named(shape: MeshShape) -> MeshShape:
    return replace(shape, name="single") if shape.size == 1 else shape


def _cluster_of(cluster: Cluster, devices: int) -> Cluster:
    """Return a cluster of as many nodes of the same kind as the devices need."""
    return replace(cluster, devices=devices, nodes=-(-devices // cluster.devices_per_node))


def _slowest_factor(deviation: float, ranks: int, measured: int) -> float:
    """Return the expected time of the slowest of `ranks` ranks relative to that of the slowest of `measured` ranks.

    The largest of n normal deviations is about sqrt(2 ln n) standard deviations.
    """
    return 1 + deviation * max(0.0, math.sqrt(2 * math.log(ranks)) - math.sqrt(2 * math.log(measured)))
