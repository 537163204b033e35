"""The recipe for tokens gives the same bits on any number of processes, though each shard is padded on its own."""

from pathlib import Path
from typing import Any

import pytest

from system import events, here, weights

SMALL = ("epochs=2", "data.options.lines=250", "model.options.width=16", "metrics=[]")


def train(place: Path, processes: int, *overrides: str, name: str | None = None) -> dict[str, Any]:
    """Train on so many processes; all that the run came to."""
    chosen = name or f"on-{processes}"
    settings = [f"--set={override}" for override in overrides]
    assert here("train", "tokens", "--processes", processes, "--name", chosen, *settings, cwd=place) == 0
    run = place / "runs" / chosen
    depends_on_speed = ("time", "samples_per_second", "data_seconds")
    told = [*events(run, "step"), *events(run, "evaluation")]
    return {
        "weights": weights(run),
        "told": [{key: value for key, value in event.items() if key not in depends_on_speed} for event in told],
    }


def test_four_numbers_of_processes_give_the_same_bits(tmp_path: Path) -> None:
    one, *others = (train(tmp_path, processes, *SMALL) for processes in (1, 2, 3, 4))
    assert [event["event"] for event in one["told"]] == [*["step"] * 14, *["evaluation"] * 2]
    for other in others:
        assert other == one


@pytest.mark.slow
def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    """Else the comparison above could hold for runs that do not train."""
    first = train(tmp_path, 1, *SMALL, name="first")
    second = train(tmp_path, 1, *SMALL, "step.seed=1", name="second")
    assert first["weights"] != second["weights"]
    assert first["told"] != second["told"]


@pytest.mark.slow
def test_recipe_as_it_ships_learns_on_one_process_and_on_three(tmp_path: Path) -> None:
    one, *others = (train(tmp_path, processes) for processes in (1, 3))
    assert one["told"][-1]["samples"] == 201
    assert one["told"][-1]["accuracy"] >= 0.75
    for other in others:
        assert other == one
