"""What is seen of a recipe before anything is looked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """A recipe, after two steps of it.

    Attributes:
        device: what ranks compute on, `cpu` or `cuda`.
        workers: that a run has where nobody says how many.
        peak: bytes of the rank that took most: on a GPU of it, on a CPU of the machine's memory.
        norms: layers of batch norm.
        dropouts: layers of dropout.
        has_images: the model's inputs can be laid out channels last.
    """

    device: str
    workers: int
    peak: int
    norms: int
    dropouts: int
    has_images: bool
