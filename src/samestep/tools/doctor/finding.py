"""What one check found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "info", "warn", "fail"]

Judge = Callable[..., "Finding"]

_RISING: tuple[Verdict, ...] = ("info", "pass", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        name: what was looked at.
        verdict: `pass`; `info`, which is told without a judgement; `warn`, a run works but slowly, or not as one would
            think; `fail`, a run fails, hangs or is lost.
        value: what was found.
        rule: what should be, for a warning or a failure.
        do: the way out.
    """

    name: str
    verdict: Verdict
    value: str
    rule: str | None = None
    do: str | None = None


def passes(name: str, value: str) -> Finding:
    """As it should be."""
    return Finding(name, "pass", value)


def informs(name: str, value: str) -> Finding:
    """Told without a judgement."""
    return Finding(name, "info", value)


def warns(name: str, value: str, *, rule: str, do: str) -> Finding:
    """A run works, but slowly, or not as one would think."""
    return Finding(name, "warn", value, rule, do)


def fails(name: str, value: str, *, rule: str, do: str) -> Finding:
    """A run fails, hangs or is lost."""
    return Finding(name, "fail", value, rule, do)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on all of them; `pass` on none."""
    return max((finding.verdict for finding in findings), key=_RISING.index, default="pass")


def size_text(size: float) -> str:
    """A number of bytes for people: `64 MiB`, `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 100 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
