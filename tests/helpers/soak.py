"""Kills a run of `digits` at random moments; in the end its weights equal those of an uninterrupted run.

make soak KILLS=100
make soak KILLS=100 MODE=pipeline   stops it in `samestep ... 2>&1 | tee log` by Ctrl-C, SIGTERM and SIGHUP
make soak KILLS=20 MODE=launcher    kills the launcher of a rank that is stopped or in C code
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from helpers.orphans import kill_launcher_of_blocked_rank
from helpers.pipelines import CODE, exit_code, pipeline
from helpers.system import Running, events, samestep, steps_saved, until, weights

RECIPE = ("digits",)
# Done, one report, stop request, killed, stop request before the command handles signals.
ENDS = (0, 1, 130, -signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM)
ENDS_IN_PIPELINE = (0, 130, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
# Share of the stops in a pipeline that come while the run starts, and the length of that time.
START_UP_SHARE, START_UP_SECONDS = 0.2, 4.0
SHORTEST_SECONDS, LONGEST_SECONDS = 0.3, 60.0
SAVING = ("--checkpoint-every", 1, "--max-lost-work", "1s")


@dataclass
class Soak:
    """One run that is killed over and over.

    Attributes:
        left: how many kills there are to come.
        finished: how many runs came to their end, with the right weights, before the last kill.
        kills: number of kills by target.
    """

    place: Path
    chance: random.Random
    left: int
    finished: int = 0
    kills: dict[str, int] = field(default_factory=dict)

    def once(self) -> bool:
        """Start or resume the run on a random number of processes and kill parts of it; whether it came to its end."""
        run = self.place / "runs/soaked"
        begin, processes = self._begin(run), self.chance.randint(1, 4)
        restarts = self.chance.choice((0, 2))
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

    def _begin(self, run: Path) -> tuple[object, ...]:
        """Return the arguments that resume the run; without a checkpoint, remove the run and start it."""
        if any(run.glob("checkpoints/step-*")):
            return ("resume", run)
        shutil.rmtree(run, ignore_errors=True)
        return ("train", *RECIPE, "--name", run.name)

    def once_in_pipeline(self) -> bool:
        """Stop a pipeline with the run at a random moment; whether the run came to its end.

        The only checkpoint within an epoch is that of the stop: a step that it lacks is lost work.
        """
        run = self.place / "runs/soaked"
        begin = self._begin(run)
        (self.place / CODE).unlink(missing_ok=True)
        with pipeline(*begin, "--processes", self.chance.randint(1, 3), cwd=self.place) as running:
            if self.chance.random() < START_UP_SHARE:
                time.sleep(self.chance.random() * START_UP_SECONDS)
            elif self._got_on(running, run):
                time.sleep(self.chance.random() * 0.1)
            if running.is_running():
                number = self.chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
                running.kill_group(number)
                self.left -= 1
                self.kills[number.name] = self.kills.get(number.name, 0) + 1
            running.wait(60)
            until(lambda: not running.processes(), "no process is left", 20)
        if not (self.place / CODE).exists():
            return False  # the shell was ended before it started the command
        code, log = exit_code(self.place), (self.place / "log").read_text(encoding="utf-8")
        assert code in ENDS_IN_PIPELINE, f"{code}\n{log}"
        steps = [event["step"] for event in events(run, "step")]
        assert not steps or steps_saved(run)[-1:] == steps[-1:], f"work is lost: {steps[-1]}, {steps_saved(run)}\n{log}"
        return code == 0

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


def soak(kills: int, seed: int, place: Path, *, in_pipeline: bool = False) -> Soak:
    """Kill a run so many times, let it end, and compare. A run that ends before is followed by another.

    Raises:
        AssertionError: weights or optimizer state differ from those of an uninterrupted run.
    """
    done = samestep("train", *RECIPE, "--name", "whole", "--processes", 2, cwd=place, timeout=300)
    assert done.code == 0, done.err
    run, whole = place / "runs/soaked", place / "runs/whole"
    soaked = Soak(place, random.Random(seed), kills)
    once = soaked.once_in_pipeline if in_pipeline else soaked.once
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("kills", total=kills)
        while soaked.left:
            if once():
                assert weights(run) == weights(whole)
                soaked.finished += 1
                shutil.rmtree(run)
            progress.update(task, completed=kills - soaked.left)
    begin = soaked._begin(run)
    done = samestep(*begin, "--processes", 3, cwd=place, timeout=300)
    assert done.code == 0, done.err
    assert weights(run) == weights(whole)
    return soaked


def soak_launcher(kills: int, seed: int, place: Path) -> None:
    """Kill the launcher of a rank that is stopped or in C code so many times; no process remains."""
    chance = random.Random(seed)
    for number in range(kills):
        path = place / str(number)
        path.mkdir()
        kill_launcher_of_blocked_rank(path, chance.choice(("stopped", "in C code")))


def main() -> None:
    """Soak in a folder that is removed afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and targets of kills")
    parser.add_argument("--mode", choices=("parts", "pipeline", "launcher"), default="parts")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        if arguments.mode == "launcher":
            soak_launcher(arguments.kills, arguments.seed, Path(place))
            print(f"{arguments.kills} kills of a launcher, no process left, {time.monotonic() - began:.0f} s")
            return
        soaked = soak(arguments.kills, arguments.seed, Path(place), in_pipeline=arguments.mode == "pipeline")
        model, _ = weights(Path(place) / "runs/soaked")
    counts = ", ".join(f"{name} {count}" for name, count in sorted(soaked.kills.items()))
    print(
        f"{sum(soaked.kills.values())} kills ({counts}) of {soaked.finished + 1} runs, {time.monotonic() - began:.0f} s"
    )
    print(f"model.safetensors equal to that of an uninterrupted run: {model}")


if __name__ == "__main__":
    main()
