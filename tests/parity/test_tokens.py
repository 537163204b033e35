"""The recipe `tokens`, with padding per microbatch, gives the same bits on any number of processes."""

from pathlib import Path
from typing import Any

import pytest

from helpers.system import events, here, weights

SMALL = ("epochs=2", "data.options.lines=250", "model.options.width=16", "metrics=[]")


def train(root: Path, processes: int, *overrides: str, name: str | None = None) -> dict[str, Any]:
    """Train on `processes` processes and return weights and events."""
    run_name = name or f"on-{processes}"
    settings = [f"--set={override}" for override in overrides]
    assert here("train", "tokens", "--exact", "--processes", processes, "--name", run_name, *settings, cwd=root) == 0
    run = root / "runs" / run_name
    depends_on_speed = ("time", "samples_per_second", "data_seconds")
    all_events = [*events(run, "step"), *events(run, "evaluation")]
    return {
        "weights": weights(run),
        "events": [{key: value for key, value in event.items() if key not in depends_on_speed} for event in all_events],
    }


@pytest.mark.slow
def test_1_2_3_and_4_processes_give_the_same_bits(tmp_path: Path) -> None:
    one, *others = (train(tmp_path, processes, *SMALL) for processes in (1, 2, 3, 4))
    assert [event["event"] for event in one["events"]] == [*["step"] * 14, *["evaluation"] * 2]
    for other in others:
        assert other == one
