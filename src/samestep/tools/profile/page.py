"""A profile for people: a table, what is said of it, and a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from samestep.tools.profile.advice import milliseconds
from samestep.tools.profile.profiled import TENSORBOARD, Profiled
from samestep.tools.profile.steps import PHASES, Phase

_WIDEST = 200
_NAMES: dict[Phase, str] = {
    "data": "waiting for data",
    "communication": "communication, exposed",
    "computing": "forward and backward",
    "other": "host, other",
}
# Okabe and Ito's, which colour-blind people can tell apart, and two greys.
_COLOURS: dict[Phase, str] = {
    "data": "#E69F00",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "computing": "#0072B2",
    "communication": "#D55E00",
    "optimizer": "#009E73",
    "checkpoint": "#CC79A7",
    "other": "#999999",
}


def show(found: Profiled) -> None:
    """Print a profile."""
    console, lines = Console(), table(found)
    width = console.measure(lines, options=console.options.update(width=_WIDEST)).maximum
    Console(width=max(console.width, width)).print(lines)
    print()
    for line in said(found):
        print(line)


def table(found: Profiled) -> Table:
    """A line a phase, a column a rank."""
    measured = found.found
    lines = Table(box=None, pad_edge=False, header_style="bold")
    lines.add_column("a step", no_wrap=True)
    for rank in range(measured.size):
        lines.add_column(f"rank {rank}", justify="right", no_wrap=True)
    lines.add_column("share", justify="right", no_wrap=True)
    for phase in PHASES:
        values = [phases[phase] for phases in measured.phases]
        if phase == "communication" and measured.size == 1:
            continue
        if any(values) or phase not in ("computing", "checkpoint", "forward", "backward"):
            lines.add_row(*_row(found, _NAMES.get(phase, phase), values))
        if phase == "communication" and measured.waiting.steps:
            lines.add_row(*_row(found, "  of it, for a later rank", measured.waiting.own))
    lines.add_row(*_row(found, "all", [sum(phases.values()) for phases in measured.phases]), style="bold")
    if measured.size > 1 and measured.around.is_known_inside:
        lines.add_row(*_row(found, "communication, hidden", measured.hidden), style="dim")
    return lines


def _row(found: Profiled, name: str, values: list[float]) -> list[str]:
    mean = sum(values) / len(values)
    return [name, *map(milliseconds, values), f"{mean / found.found.step_seconds:.0%}"]


def said(found: Profiled) -> list[str]:
    """What is to be told besides the table, in lines."""
    lines = [f"{'straggler':<12}{_straggler(found)}"] if found.found.size > 1 else []
    lines += [f"{'note':<12}{note}" for note in found.notes]
    if not found.advice:
        lines.append(f"{'advice':<12}nothing stands out: no change that is known here saves a tenth of a step")
    for number, each in enumerate(found.advice, start=1):
        share = each.seconds / found.found.step_seconds
        lines.append("")
        lines.append(f"{number}. {each.cause}: up to {milliseconds(each.seconds)} of a step, {share:.0%}")
        lines.append(f"   {'seen':<9}{each.evidence}")
        lines.append(f"   {'do':<9}{each.do}")
        lines.append(f"   {'estimate':<9}{each.estimate}")
    return lines


def written(found: Profiled, *, is_drawn: bool) -> list[str]:
    """The lines that say where everything is."""
    folder = found.plan.folder
    lines = [f"{'written':<12}{folder / 'profile.json'}{', profile.png beside it' if is_drawn else ''}"]
    if found.trace is not None:
        lines.append(f"{'trace':<12}{found.trace}: open it in https://ui.perfetto.dev")
        lines.append(f"{'tensorboard':<12}tensorboard --logdir {folder / TENSORBOARD}")
    return lines


def _straggler(found: Profiled) -> str:
    late = found.straggler
    if late is None:
        return (
            "none: ranks wait for each other by turns, or hardly at all" if found.found.waiting.steps else "not known"
        )
    return (
        f"rank {late.rank} comes last to {late.last} of {late.apart} meetings; the others wait "
        f"{milliseconds(late.seconds)} a step for it. It takes {milliseconds(late.more)} longer in {late.phase}"
    )


def draw(found: Profiled, path: Path) -> None:
    """Write a PNG: a bar a rank, in the colours of the phases."""
    from matplotlib.figure import Figure

    measured = found.found
    figure = Figure(figsize=(8, 1.6 + 0.4 * measured.size), dpi=150, layout="constrained")
    axes = figure.subplots()
    ranks = range(measured.size)
    left = [0.0] * measured.size
    for phase in PHASES:
        values = [1e3 * phases[phase] for phases in measured.phases]
        if any(values):
            axes.barh(ranks, values, left=left, color=_COLOURS[phase], label=_NAMES.get(phase, phase))
            left = [before + value for before, value in zip(left, values, strict=True)]
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=8)
    axes.set_ylim(measured.size - 0.4, -0.6)
    axes.set_xlabel("milliseconds of a step")
    axes.set_title(f"{found.name} on {found.machine['device']}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    figure.savefig(path)
