"""Time of collectives on a cluster: rings, trees, halving and doubling, and a hierarchy of nodes.

Each message costs a latency and a time per byte (Hockney, "The communication challenge for MPP: Intel Paragon and Meiko
CS-2", 1994). Formulas: Thakur et al., "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Up to this size, `samestep.strategies.reduction` exchanges complete vectors.
SMALL_BYTES = 2**20


@dataclass(frozen=True)
class Link:
    """Connection of two ranks.

    Attributes:
        latency: seconds of a message without content.
        byte_seconds: seconds of each byte.
    """

    latency: float
    byte_seconds: float

    def seconds(self, size: float, messages: float = 1) -> float:
        """Return the time of `messages` messages with `size` bytes in total."""
        return messages * self.latency + size * self.byte_seconds

    def scaled(self, factor: float) -> Link:
        """Return a link that is slower by a factor."""
        return Link(self.latency * factor, self.byte_seconds * factor)


def is_power_of_two(number: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, ..."""
    return number & (number - 1) == 0


def ring_bytes(ranks: int, size: float) -> float:
    """Return the bytes that a rank sends in an all-reduce of `size` bytes; no algorithm sends fewer."""
    return 2 * (ranks - 1) / ranks * size


def ring_seconds(link: Link, ranks: int, size: float) -> float:
    """Return the time of a ring all-reduce."""
    return link.seconds(ring_bytes(ranks, size), 2 * (ranks - 1))


def tree_seconds(link: Link, ranks: int, size: float) -> float:
    """Return the time of an all-reduce in a double binary tree.

    Sanders et al., "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
    """
    return 0.0 if ranks == 1 else link.seconds(2 * size, 2 * (ranks - 1).bit_length())


@dataclass(frozen=True)
class Axis:
    """Ranks of one axis of a mesh on a cluster.

    Attributes:
        size: number of ranks of the axis.
        local: number of these ranks on one node.
        inside: link of two ranks on a node.
        between: link of two ranks on different nodes, when all ranks of a node send at the same time.
    """

    size: int
    local: int
    inside: Link
    between: Link

    @property
    def nodes(self) -> int:
        """Number of nodes that the axis spans."""
        return -(-self.size // self.local)

    @property
    def slowest(self) -> Link:
        """Link that a ring over all ranks waits for."""
        return self.between if self.nodes > 1 else self.inside

    def exact_all_reduce(self, size: float) -> float:
        """Return the time of the tree all-reduce of `reduction: exact`.

        Pairs of ranks exchange vectors, or halves of halves. For other numbers of ranks than powers of two, each rank
        reduces one slice.
        """
        if self.size == 1 or size == 0:
            return 0.0
        if not is_power_of_two(self.size):
            return self.slowest.seconds(ring_bytes(self.size, size), 2 * (self.size - 1))
        seconds, distance, part = 0.0, 1, size
        while distance < self.size:
            link = self.inside if distance < self.local else self.between
            part /= 2
            seconds += link.seconds(size) if size <= SMALL_BYTES else 2 * link.seconds(part)
            distance *= 2
        return seconds

    def fast_all_reduce(self, size: float) -> float:
        """Return the time of an all-reduce of the backend: the fastest of ring, tree and hierarchy."""
        if self.size == 1 or size == 0:
            return 0.0
        ring = ring_seconds(self._single_flow, self.size, size)
        tree = tree_seconds(self._single_flow, self.size, size)
        return min(ring, tree, self._hierarchical(size))

    @property
    def _single_flow(self) -> Link:
        """Slowest link if one rank of a node sends to another node, as in a ring over neighbors."""
        if self.nodes == 1:
            return self.inside
        return Link(self.between.latency, max(self.inside.byte_seconds, self.between.byte_seconds / self.local))

    def _hierarchical(self, size: float) -> float:
        """Return the time of reduce-scatter on nodes, all-reduce of parts between nodes, and all-gather on nodes."""
        part = size / self.local
        return ring_seconds(self.inside, self.local, size) + ring_seconds(self.between, self.nodes, part)

    def all_gather(self, size: float) -> float:
        """Return the time of an all-gather with a result of `size` bytes, or of a reduce-scatter of `size` bytes."""
        if self.size == 1 or size == 0:
            return 0.0
        return self.slowest.seconds((self.size - 1) / self.size * size, self.size - 1)


@dataclass(frozen=True)
class Cluster:
    """Devices and their links.

    Attributes:
        devices: number of devices.
        nodes: number of nodes.
        inside: link of two ranks on a node, by the number of ranks of the node that send at the same time.
        link: link of a node.
    """

    devices: int
    nodes: int
    inside: Mapping[int, Link]
    link: Link

    @property
    def devices_per_node(self) -> int:
        """Number of devices of a node."""
        return -(-self.devices // self.nodes)

    def axis(self, size: int, inner: int) -> Axis:
        """Return an axis of `size` ranks, whose neighbors are `inner` ranks apart."""
        per_node = self.devices_per_node
        local = min(size, max(1, per_node // inner))
        inside = at_level(self.inside, per_node) if self.inside else self.link
        between = Link(
            max(inside.latency, self.link.latency), max(inside.byte_seconds, self.link.byte_seconds * per_node)
        )
        return Axis(size, local, inside, between)


def at_level(links: Mapping[int, Link], level: int) -> Link:
    """Return the measured link of the closest smaller number of ranks, or of the smallest."""
    return links[max((measured for measured in links if measured <= level), default=min(links))]
