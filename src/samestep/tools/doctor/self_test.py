"""Ranks that are started as a run's are, meet, sum, and take shards from workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samestep.errors import SamestepError
from samestep.runtime.by_name import ByName
from samestep.runtime.launch import launch
from samestep.tools.doctor.finding import Finding, fails, informs, passes, size_text
from samestep.tools.doctor.plan import Plan
from samestep.tools.doctor.probe_facts import Met, TorchView

_PROBE = "samestep.tools.doctor.probe"
_PATIENCE_SECONDS = 40.0
_MOST_RANKS = 8


@dataclass(frozen=True)
class SelfTest:
    """How it went.

    Attributes:
        view: what torch sees; None where no rank could be asked.
        met: what ranks found; None where they did not come that far.
        failed: the report of what went wrong, if something did.
    """

    view: TorchView | None = None
    met: Met | None = None
    failed: str | None = None


def run_self_test(plan: Plan, preload: Sequence[str]) -> SelfTest:
    """Ask one rank what torch sees, then let ranks meet: one a GPU where there are several, else two on the CPU.

    Args:
        preload: what the process imports that ranks are forked from.
    """
    view = None
    try:
        view = _torch_view(preload)
        gpus = len(view.gpus)
        count, device = (min(gpus, _MOST_RANKS), "cuda") if gpus > 1 else (2, "cpu")
        return SelfTest(view, _meet(device, plan, count, preload))
    except (SamestepError, OSError, EOFError, RuntimeError) as error:  # the last: no more threads may be started
        return SelfTest(view, failed=str(error) or type(error).__name__)


def _torch_view(preload: Sequence[str]) -> TorchView:
    asked = ByName(_PROBE, "torch_view")
    view: TorchView = launch(asked, processes=1, preload=preload, hang_after=_PATIENCE_SECONDS)
    return view


def _meet(device: str, plan: Plan, ranks: int, preload: Sequence[str]) -> Met:
    asked, patience = ByName(_PROBE, "meet"), _PATIENCE_SECONDS
    met: Met = launch(asked, device, plan.shard_bytes, processes=ranks, preload=preload, hang_after=patience)
    return met


def check_self_test(test: SelfTest | None) -> Iterator[Finding]:
    """Whether ranks started, met and computed."""
    name = "self-test"
    if test is None:
        yield informs(name, "left out: --quick, a loopback interface that is down, or rank 0 of this job does it")
        return
    if test.failed is not None:
        yield fails(
            name,
            test.failed.splitlines()[0],
            rule="two ranks start, meet over loopback, sum, and take a shard from a worker",
            do="mend what fails in the lines above; if nothing does, send the report: samestep doctor --bundle FILE",
        )
    elif test.met is not None and test.met.wrong is not None:
        ranks = test.met.ranks
        yield fails(
            name,
            f"{ranks} ranks summed 1 to {ranks} and got {test.met.wrong:g}",
            rule=f"{ranks * (ranks + 1) // 2}",
            do="do not train here: look at NCCL's version and environment, the driver, and the memory of the GPUs",
        )
    elif test.met is not None:
        where = "GPUs" if test.met.device == "cuda" else "the CPU"
        yield passes(
            name,
            f"{test.met.ranks} ranks on {where} met, summed and took shards from workers; "
            f"each held {size_text(test.met.resident)}",
        )
