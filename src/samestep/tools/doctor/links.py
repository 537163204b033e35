"""What sums between devices should cost, by the links between them.

Not run on hardware yet: figures are those of the makers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from samestep.tools.doctor.finding import Finding, informs, passes, warns
from samestep.tools.doctor.nvidia import Nvidia
from samestep.tools.doctor.probe_facts import Met

_GB = 1e9
# Bytes a second of one NVLink in one direction, by what the name of the card holds (NVIDIA's data sheets).
_NVLINK = (("P100", 20.0), ("V100", 25.0), ("3090", 14.0), ("B100", 50.0), ("B200", 50.0), ("B300", 50.0))
_NVLINK_ELSE = 25.0  # A100, A30, A40, A800, H100, H200, H800
# Of one lane of PCI Express in one direction, by generation.
_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# What is left of them at the least in an all-reduce on a sound machine; a ring over PCI Express shares its switches.
_SHARE = {"NVLink": 0.5, "PCI Express": 0.25}


def nominal(nvidia: Nvidia) -> tuple[str, float] | None:
    """The kind of the slowest link among all cards, and its bytes a second in one direction; None if unknown."""
    pairs = [entry for number, row in enumerate(nvidia.links) for other, entry in enumerate(row) if number != other]
    counts = [int(found[1]) if (found := re.fullmatch(r"NV(\d+)", entry)) else 0 for entry in pairs]
    if counts and min(counts) > 0:
        name = nvidia.cards[0].name
        one = next((rate for part, rate in _NVLINK if part in name), _NVLINK_ELSE)
        return "NVLink", min(counts) * one * _GB
    lanes = [
        _LANE[card.generation] * card.lanes
        for card in nvidia.cards
        if card.generation in _LANE and card.generation is not None and card.lanes
    ]
    return ("PCI Express", min(lanes) * _GB) if lanes and len(lanes) == len(nvidia.cards) else None


def check_bandwidth(met: Met, nvidia: Nvidia) -> Iterator[Finding]:
    """Whether a sum over ranks is as fast as the links allow."""
    name, rate = "all-reduce", f"{met.bandwidth / _GB:.3g} GB/s"
    if met.device != "cuda":
        yield informs(name, f"{rate} between {met.ranks} processes over loopback, by gloo")
        return
    link = nominal(nvidia)
    if link is None:
        yield informs(name, f"{rate} between {met.ranks} GPUs; what their links should give is not known")
        return
    kind, should = link
    value = f"{rate} between {met.ranks} GPUs, whose {kind} has {should / _GB:.3g} GB/s"
    if met.bandwidth >= _SHARE[kind] * should:
        yield passes(name, value)
        return
    yield warns(
        name,
        value,
        rule=f"{_SHARE[kind]:.0%} of it or more",
        do="see the line on peer-to-peer access, NCCL_P2P_DISABLE and others that are set, and whether another job "
        "uses the GPUs; NCCL_DEBUG=INFO names the way that NCCL took; nvidia-smi topo -m",
    )
