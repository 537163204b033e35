"""Tests of the times of collectives, and of the interval between checkpoints."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.plan.checkpoint_interval import daly_interval, useful_share, young_interval
from samestep.tools.plan.collectives import SMALL_BYTES, Axis, Cluster, Link, ring_bytes, ring_seconds, tree_seconds

FAST, SLOW = Link(1e-6, 1e-10), Link(2e-5, 1e-9)
LARGE = 64 * SMALL_BYTES


def test_ring_sends_the_bytes_of_a_reduce_scatter_and_an_all_gather() -> None:
    assert ring_bytes(1, 100) == 0
    assert ring_bytes(2, 100) == 100
    assert ring_bytes(4, 100) == 150
    assert ring_seconds(Link(3.0, 2.0), 4, 100) == 6 * 3.0 + 150 * 2.0


@given(st.integers(1, 12), st.floats(1e3, 1e9))
def test_halving_and_doubling_sends_the_bytes_of_a_ring_with_fewer_messages(power: int, size: float) -> None:
    ranks = 2**power
    axis = Axis(ranks, ranks, Link(0.0, 1e-9), SLOW)
    expected = ring_bytes(ranks, size) if size > SMALL_BYTES else power * size
    assert axis.exact_all_reduce(size) == pytest.approx(expected * 1e-9)
    messages = Axis(ranks, ranks, Link(1.0, 0.0), SLOW).exact_all_reduce(size)
    assert messages == (2 * power if size > SMALL_BYTES else power)


def test_tree_is_faster_than_a_ring_for_short_vectors_on_many_ranks() -> None:
    assert tree_seconds(FAST, 1, 64) == 0
    assert tree_seconds(FAST, 1024, 64) < ring_seconds(FAST, 1024, 64)
    assert tree_seconds(FAST, 4, LARGE) > ring_seconds(FAST, 4, LARGE)


def test_hierarchy_sends_each_byte_between_nodes_once() -> None:
    # All eight ranks of a node share its link: each sends a part of an eighth.
    axis = Axis(64, 8, Link(0.0, 0.0), Link(0.0, 8e-9))
    assert axis.nodes == 8
    assert axis.fast_all_reduce(LARGE) == pytest.approx(ring_bytes(8, LARGE) * 1e-9)
    assert axis.exact_all_reduce(LARGE) == pytest.approx(ring_bytes(8, LARGE) * 1e-9)


@pytest.mark.parametrize(
    ("size", "inner", "local", "nodes"), [(4, 1, 4, 1), (8, 1, 4, 2), (2, 4, 1, 2), (4, 2, 2, 2), (1, 1, 1, 1)]
)
def test_inner_axes_are_on_one_node(size: int, inner: int, local: int, nodes: int) -> None:
    axis = Cluster(8, 2, {2: FAST}, SLOW).axis(size, inner)
    assert (axis.local, axis.nodes) == (local, nodes)
    assert axis.inside == FAST
    assert axis.between.byte_seconds == 4 * SLOW.byte_seconds  # four devices share the link of a node


def test_other_numbers_than_powers_of_two_reduce_slices() -> None:
    axis = Axis(3, 3, Link(1.0, 0.0), SLOW)
    assert axis.exact_all_reduce(LARGE) == 4


def test_interval_of_young() -> None:
    assert young_interval(2.0, 900.0) == 60.0


def test_interval_of_daly_is_close_to_the_best_interval() -> None:
    checkpoint, mtbf = 10.0, 3600.0
    candidates = [1.01**number for number in range(1, 1200)]
    best = max(candidates, key=lambda interval: useful_share(interval, checkpoint, 0.0, mtbf))
    assert daly_interval(checkpoint, mtbf) == pytest.approx(best, rel=0.02)
    assert daly_interval(1.0, 1e9) == pytest.approx(young_interval(1.0, 1e9), rel=1e-4)
    assert daly_interval(100.0, 40.0) == 40.0


def test_useful_share_is_that_of_a_simulated_job() -> None:
    # Without failures only checkpoints cost time; with a failure in each segment, no segment ends.
    assert useful_share(90.0, 10.0, 0.0, 1e9) == pytest.approx(0.9, rel=1e-6)
    assert useful_share(90.0, 10.0, 60.0, 0.1) == 0.0
    interval, checkpoint, restart, mtbf = 50.0, 5.0, 20.0, 100.0
    # Expected time of a segment with failures at a constant rate, from a renewal argument.
    expected = math.exp(restart / mtbf) * mtbf * (math.exp((interval + checkpoint) / mtbf) - 1)
    assert useful_share(interval, checkpoint, restart, mtbf) == pytest.approx(interval / expected)
