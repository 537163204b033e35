"""GPUs: those that are there, those that this process is told to see, and who holds their memory.

Not run on hardware yet, save where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from samestep.tools.doctor.finding import Finding, fails, informs, passes, size_text, warns
from samestep.tools.doctor.nvidia import Nvidia
from samestep.tools.doctor.probe_facts import TorchView

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# What a desktop may take of a card that also drives a screen.
_DESKTOP = 1 << 30


def check_visible(variables: Mapping[str, str], nvidia: Nvidia) -> Iterator[Finding]:
    """Whether CUDA_VISIBLE_DEVICES names devices as CUDA reads it."""
    if _VISIBLE not in variables:
        return
    text = variables[_VISIBLE]
    entries = [entry.strip() for entry in text.split(",")]
    there = len(nvidia.cards)
    if not text.strip():
        yield warns(
            _VISIBLE,
            "is set and empty: no process sees a GPU",
            rule="it names the devices that a process may use; unset, all of them",
            do=f"unset {_VISIBLE}, unless ranks are to compute on the CPU (--device cpu)",
        )
    elif len(set(entries)) < len(entries):
        twice = sorted({entry for entry in entries if entries.count(entry) > 1})
        yield fails(
            _VISIBLE,
            f"is {text}: {', '.join(twice)} is there twice, and so torch sees no GPU at all",
            rule="each device once",
            do=f"export {_VISIBLE}={','.join(dict.fromkeys(entries))}",
        )
    elif there and any(entry.isdecimal() and int(entry) >= there for entry in entries):
        yield fails(
            _VISIBLE,
            f"is {text}, but there are {there} GPUs, numbered from 0",
            rule="CUDA sees none after the first that is not there",
            do=f"export {_VISIBLE}={','.join(map(str, range(there)))}, or unset it",
        )
    else:
        yield passes(_VISIBLE, text)


def check_gpus(nvidia: Nvidia, view: TorchView | None) -> Iterator[Finding]:
    """Whether torch sees the GPUs that are there, and has kernels for them."""
    if nvidia.failed is not None:
        yield fails(
            "nvidia-smi",
            nvidia.failed,
            rule="the driver answers",
            do="after an update of the driver, restart the machine; in a container, start it with --gpus all",
        )
    if view is not None and view.failed is not None and (nvidia.driver is not None or nvidia.cards):
        yield fails(
            "GPUs",
            f"torch cannot use them: {view.failed}",
            rule="CUDA starts",
            do="see the lines on CUDA, driver and CUDA_VISIBLE_DEVICES; nvidia-smi -q names a card that is lost",
        )
    elif view is not None and view.gpus:
        yield passes("GPUs", ", ".join(view.gpus))
        if view.too_new:
            yield fails(
                "kernels for these GPUs",
                f"{', '.join(view.too_new)}: this build of torch has none",
                rule='a build of torch has kernels for some generations of GPUs; "no kernel image is available"',
                do="install a torch that was built for a newer CUDA",
            )
    elif nvidia.cards:
        yield informs("GPUs", ", ".join(card.name for card in nvidia.cards) + ", as the driver has it")
    else:
        yield informs("GPUs", "none; ranks compute on the CPU")


def check_peers(view: TorchView | None) -> Iterator[Finding]:
    """Whether GPUs reach one another's memory."""
    if view is None or len(view.gpus) < 2:
        return
    if not view.apart:
        yield passes("peer-to-peer access", f"each of {len(view.gpus)} GPUs reaches the others' memory")
        return
    pairs = ", ".join(f"{one} to {other}" for one, other in view.apart[:8])
    more = f" and {len(view.apart) - 8} more" if len(view.apart) > 8 else ""
    yield warns(
        "peer-to-peer access",
        f"not from GPU {pairs}{more}",
        rule="GPUs that reach one another's memory sum gradients without the detour over the machine's memory",
        do="GeForce cards have none; else look for access control services (ACS, IOMMU) that the firmware or a virtual "
        "machine has switched on: nvidia-smi topo -p2p r",
    )


def check_tenants(nvidia: Nvidia) -> Iterator[Finding]:
    """Whether somebody holds memory of the GPUs already."""
    taken = [(number, card) for number, card in enumerate(nvidia.cards) if card.used > _DESKTOP]
    for number, card in taken:
        processes = [tenant.process for tenant in nvidia.tenants if tenant.uuid == card.uuid]
        who = f"process {', '.join(map(str, processes))}" if processes else "a process that cannot be seen from here"
        yield warns(
            f"memory of GPU {number}",
            f"{size_text(card.used)} of {size_text(card.total)} are held by {who}",
            rule="a run finds the memory of its GPUs free",
            do="if it is left over from another run, end it: kill PROCESS (ps -fp PROCESS tells whose it is)",
        )
    if nvidia.cards and not taken:
        yield passes("memory of GPUs", "free")
