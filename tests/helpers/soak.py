"""Kills a run of `digits` at random moments; in the end its weights equal those of an uninterrupted run.

make soak KILLS=100
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from helpers.system import Running, events, samestep, until, weights

RECIPE = ("digits",)
# Done, one report, asked to end, killed, asked to end before the command could listen.
ENDS = (0, 1, 130, -signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM)
SHORTEST_SECONDS, LONGEST_SECONDS = 0.3, 60.0
SAVING = ("--checkpoint-every", 1, "--max-lost-work", "1s")


@dataclass
class Soak:
    """One run that is killed over and over.

    Attributes:
        left: how many kills there are to come.
        kills: how often each was killed, by what it was.
    """

    place: Path
    chance: random.Random
    left: int
    kills: dict[str, int] = field(default_factory=dict)

    def once(self) -> bool:
        """Start or resume the run on a random number of processes and kill parts of it; whether it came to its end."""
        run = self.place / "runs/soaked"
        processes = self.chance.randint(1, 4)
        restarts = self.chance.choice((0, 2))
        begin = ("resume", run) if any(run.glob("checkpoints/step-*")) else ("train", *RECIPE, "--name", "soaked")
        if begin[0] == "train" and run.exists():
            for path in sorted(run.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            run.rmdir()
        machine = ("--processes", processes, "--max-restarts", restarts)
        with Running(*begin, *machine, *SAVING, cwd=self.place) as running:
            while self.left and self._got_on(running, run):
                time.sleep(self.chance.random() * 0.1)
                self._kill(running)
            done = running.wait(60)
            # A fork server that imports torch sees that its launcher was killed when it is done with that.
            until(lambda: not running.processes(), "no process is left", 20)
        assert done.code in ENDS, done.err
        assert done.code != 1 or done.err.count("\nerror: ") + done.err.startswith("error: ") == 1, done.err
        return done.code == 0

    def _got_on(self, running: Running, run: Path) -> bool:
        """Wait for a few steps more; whether it still runs then, in spite of the kill before."""
        until_step = len(events(run, "step")) + self.chance.randint(0, 3)
        begun = time.monotonic()
        while running.is_running():
            if len(events(run, "step")) >= until_step and time.monotonic() - begun > SHORTEST_SECONDS:
                return True
            assert time.monotonic() - begun < LONGEST_SECONDS, "it neither ends nor gets on"
            time.sleep(0.005)
        return False

    def _kill(self, running: Running) -> None:
        others = [process for process in running.processes() if process != running.launcher]
        what = self.chance.choice(("launcher", "process", "process", "request"))
        if what == "launcher" or (what == "process" and not others):
            running.kill(signal.SIGKILL)
        elif what == "request":
            running.kill_group(self.chance.choice((signal.SIGTERM, signal.SIGINT)))
        else:
            running.try_kill_process(self.chance.choice(others), signal.SIGKILL)
        self.left -= 1
        self.kills[what] = self.kills.get(what, 0) + 1


def soak(kills: int, seed: int, place: Path) -> Soak:
    """Kill a run so many times, let it end, and compare.

    Raises:
        AssertionError: its weights or optimizer state differ from those of an uninterrupted run.
    """
    done = samestep("train", *RECIPE, "--name", "whole", "--processes", 2, cwd=place, timeout=300)
    assert done.code == 0, done.err
    soaked = Soak(place, random.Random(seed), kills)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("kills", total=kills)
        while soaked.left and not soaked.once():
            progress.update(task, completed=kills - soaked.left)
    run = place / "runs/soaked"
    done = samestep("resume", run, "--processes", 3, cwd=place, timeout=300)
    assert done.code == 0, done.err
    assert weights(run) == weights(place / "runs/whole")
    return soaked


def main() -> None:
    """Soak in a folder that is removed afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of what is killed")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        soaked = soak(arguments.kills, arguments.seed, Path(place))
        model, _ = weights(Path(place) / "runs/soaked")
        sessions = len(events(Path(place) / "runs/soaked", "resume"))
    counts = ", ".join(f"{what} {count}" for what, count in sorted(soaked.kills.items()))
    print(f"{sum(soaked.kills.values())} kills ({counts}), resumed {sessions} times, {time.monotonic() - began:.0f} s")
    print(f"model.safetensors equal to that of an uninterrupted run: {model}")


if __name__ == "__main__":
    main()
