"""Findings of an audit: their names and meanings."""

from __future__ import annotations

from dataclasses import dataclass

# Stable names; the table of docs/guides/audit.md has the same.
NAMES = {
    "repeated-samples": "Ranks train on the same samples within an epoch.",
    "missing-samples": "An epoch leaves samples out.",
    "evaluation-counted-twice": "An evaluation counts samples twice, or leaves samples out.",
    "repeated-order": "A shuffling sampler yields the same order in several epochs.",
    "equal-random-draws": "Ranks draw equal random numbers for different samples.",
    "different-parameters": "Replicas of the model have different parameters.",
    "different-buffers": "Ranks evaluate with different buffers, such as running statistics.",
    "different-learning-rates": "Ranks use different learning rates.",
    "unreduced-gradients": "Ranks update their replicas with different gradients.",
    "schedule-stepped-too-often": "A scheduler makes several steps per optimizer step and ends too early.",
    "loss-normalisation": "Means over different numbers of targets are averaged with equal weights.",
    "non-finite-values": "Training continues with parameters that are not finite.",
    "lost-position": "A run that resumes within an epoch begins with the first batch of an epoch.",
    "files-written-by-several-ranks": "Several ranks write the same file.",
}


@dataclass(frozen=True)
class Finding:
    """One mistake with its evidence."""

    name: str
    evidence: str
    line: str  # of the user's script, empty if unknown


def plural(count: int, noun: str) -> str:
    """Return a count with a noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
