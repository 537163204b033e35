"""Kills a run at random moments, and resumes it on other numbers of processes.

In the end, weights and optimizer state equal those of an uninterrupted run.

make soak KILLS=100                    the recipe `digits`
make soak KILLS=100 SUBJECT=loop       an own loop with a `CheckpointManager`
make soak KILLS=100 SUBJECT=script     an unchanged script that saves all of its state with `os.replace`
make soak KILLS=100 MODE=pipeline      stops it in `samestep ... 2>&1 | tee log` by Ctrl-C, SIGTERM and SIGHUP
make soak KILLS=20 MODE=launcher       kills the launcher of a rank that is stopped or in C code

With `--result benchmarks/results/soak.json` the numbers are added to this file, next to those of other subjects.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, machine_line, markdown_table, save
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
_PLAIN = str.maketrans("", "", "{}'")
SAVING = ("--checkpoint-every", 1)


class Recipe:
    """A run of `digits` in a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.run = place / "runs/soaked"
        place.mkdir(exist_ok=True)

    def begin(self) -> tuple[object, ...]:
        """Return the arguments that resume the run; without a checkpoint, remove the run and start it."""
        if any(self.run.glob("checkpoints/step-*")):
            return ("resume", self.run)
        shutil.rmtree(self.run, ignore_errors=True)
        return ("train", *RECIPE, "--name", self.run.name)

    def steps(self) -> int:
        """Return the number of steps that were taken, also those that were taken again."""
        return len(events(self.run, "step"))

    def result(self) -> str:
        """Return the SHA-256 of the weights and of the optimizer state, as one."""
        return hashlib.sha256("".join(weights(self.run)).encode()).hexdigest()

    def forget(self) -> None:
        """Remove the run."""
        shutil.rmtree(self.run)


class Script(Recipe):
    """A script in a folder, which resumes by itself."""

    options: tuple[str, ...] = ("--exact",)
    source = "soaked_script.py"

    def begin(self) -> tuple[object, ...]:
        """Return the arguments that start or resume the script."""
        shutil.copy(Path(__file__).with_name(self.source), self.place / "train.py")
        return ("run", *self.options, "train.py")

    def steps(self) -> int:
        """Return the number of steps that were taken, also those that were taken again."""
        file = self.place / "steps.txt"
        return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0

    def result(self) -> str:
        """Return the SHA-256 that the script has written."""
        return (self.place / "result.txt").read_text(encoding="utf-8")

    def forget(self) -> None:
        """Remove the files of the script."""
        shutil.rmtree(self.place)
        self.place.mkdir()


class Loop(Script):
    """An own loop, which asks for `exact` itself."""

    options = ()
    source = "soaked_loop.py"


SUBJECTS = {"recipe": Recipe, "loop": Loop, "script": Script}


@dataclass
class Soak:
    """One run that is killed over and over.

    Attributes:
        left: how many kills there are to come.
        finished: how many runs came to their end, with the right weights, before the last kill.
        kills: number of kills by target.
        resizes: number of starts after the first one, each on another number of processes than the one before.
    """

    subject: Recipe
    chance: random.Random
    left: int
    finished: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    resizes: int = 0
    _processes: int = 0

    def _resized(self, most: int) -> int:
        """Return another number of processes than that of the start before."""
        others = [number for number in range(1, most + 1) if number != self._processes]
        self.resizes += self._processes != 0
        self._processes = self.chance.choice(others)
        return self._processes

    def once(self) -> bool:
        """Start or resume the run on a random number of processes and kill parts of it; whether it came to its end."""
        command, *begin = self.subject.begin()
        options: tuple[object, ...] = ("--processes", self._resized(4))
        if command != "run":
            options += ("--max-restarts", self.chance.choice((0, 2)), *SAVING)
        with Running(command, *options, *begin, cwd=self.subject.place) as running:
            while self.left and self._got_on(running):
                time.sleep(self.chance.random() * 0.1)
                self._kill(running)
            done = running.wait(60)
            # A fork server that imports torch sees that its launcher was killed when it is done with that.
            until(lambda: not running.processes(), "no process is left", 20)
        assert done.code in ENDS, done.err
        assert done.code != 1 or done.err.count("\nerror: ") + done.err.startswith("error: ") == 1, done.err
        return done.code == 0

    def once_in_pipeline(self) -> bool:
        """Stop a pipeline with the run at a random moment; whether the run came to its end.

        The only checkpoint within an epoch is that of the stop: a step that it lacks is lost work.
        """
        place = self.subject.place
        run = self.subject.run
        begin = self.subject.begin()
        (place / CODE).unlink(missing_ok=True)
        with pipeline(*begin, "--processes", self._resized(3), cwd=place) as running:
            if self.chance.random() < START_UP_SHARE:
                time.sleep(self.chance.random() * START_UP_SECONDS)
            elif self._got_on(running):
                time.sleep(self.chance.random() * 0.1)
            if running.is_running():
                number = self.chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
                running.kill_group(number)
                self.left -= 1
                self.kills[number.name] = self.kills.get(number.name, 0) + 1
            running.wait(60)
            until(lambda: not running.processes(), "no process is left", 20)
        if not (place / CODE).exists():
            return False  # the shell was ended before it started the command
        code = exit_code(place)
        log = (place / "log").read_text(encoding="utf-8")
        assert code in ENDS_IN_PIPELINE, f"{code}\n{log}"
        steps = [event["step"] for event in events(run, "step")]
        assert not steps or steps_saved(run)[-1:] == steps[-1:], f"work is lost: {steps[-1]}, {steps_saved(run)}\n{log}"
        return code == 0

    def _got_on(self, running: Running) -> bool:
        """Wait for a few steps more; whether it still runs then, in spite of the kill before."""
        until_step = self.subject.steps() + self.chance.randint(0, 3)
        begun = time.monotonic()
        while running.is_running():
            if self.subject.steps() >= until_step and time.monotonic() - begun > SHORTEST_SECONDS:
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


def soak(kills: int, seed: int, place: Path, *, subject: str = "recipe", in_pipeline: bool = False) -> Soak:
    """Kill a run so many times, let it end, and compare. A run that ends before is followed by another.

    Raises:
        AssertionError: weights or optimizer state differ from those of an uninterrupted run.
    """
    whole = SUBJECTS[subject](place / "whole")
    _run_whole(whole, processes=2)
    soaked = Soak(SUBJECTS[subject](place / "soaked"), random.Random(seed), kills)
    once = soaked.once_in_pipeline if in_pipeline else soaked.once
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("kills", total=kills)
        while soaked.left:
            if once():
                assert soaked.subject.result() == whole.result()
                soaked.finished += 1
                soaked.subject.forget()
            progress.update(task, completed=kills - soaked.left)
    _run_whole(soaked.subject, processes=3)
    assert soaked.subject.result() == whole.result()
    return soaked


def _run_whole(subject: Recipe, processes: int) -> None:
    command, *begin = subject.begin()
    done = samestep(command, "--processes", processes, *begin, cwd=subject.place)
    assert done.code == 0, done.err


def soak_launcher(kills: int, seed: int, place: Path) -> None:
    """Kill the launcher of a rank that is stopped or in C code so many times; no process remains."""
    chance = random.Random(seed)
    for number in range(kills):
        path = place / str(number)
        path.mkdir()
        kill_launcher_of_blocked_rank(path, chance.choice(("stopped", "in C code")))


def write_result(output: Path, machine: dict[str, Any], entry: dict[str, Any]) -> None:
    """Add the numbers of a soak to a file, in place of earlier numbers of the same subject and mode."""
    earlier = json.loads(output.read_text(encoding="utf-8"))["results"] if output.exists() else []
    kept = [other for other in earlier if (other["subject"], other["mode"]) != (entry["subject"], entry["mode"])]
    results = sorted([*kept, entry], key=lambda other: (other["mode"], list(SUBJECTS).index(other["subject"])))
    columns = ("subject", "mode", "kills", "targets", "resizes", "runs", "seconds", "sha256")
    rows = [[str(other[name]).translate(_PLAIN) for name in columns] for other in results]
    page = (
        "# Kills at random moments, and resumptions on other numbers of processes\n\n"
        f"{machine_line(machine)}\n\n"
        "Each run was killed until it came to its end; its weights and its optimizer state then had the SHA-256\n"
        f"of an uninterrupted run on 2 processes; resizes are changes of their number.\n\n"
        f"{markdown_table(columns, rows)}\n"
    )
    save(output, {"machine": machine, "results": results}, page)


def main() -> None:
    """Soak in a folder that is removed afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and targets of kills")
    parser.add_argument("--mode", choices=("parts", "pipeline", "launcher"), default="parts")
    parser.add_argument("--subject", choices=SUBJECTS, default="recipe")
    parser.add_argument("--result", type=Path, help="JSON file for the numbers; a Markdown table is written next to it")
    arguments = parser.parse_args()
    machine = describe_machine()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        if arguments.mode == "launcher":
            soak_launcher(arguments.kills, arguments.seed, Path(place))
            print(f"{arguments.kills} kills of a launcher, no process left, {time.monotonic() - began:.0f} s")
            return
        in_pipeline = arguments.mode == "pipeline"
        soaked = soak(arguments.kills, arguments.seed, Path(place), subject=arguments.subject, in_pipeline=in_pipeline)
        result = soaked.subject.result()
    entry = {
        "subject": arguments.subject,
        "mode": arguments.mode,
        "seed": arguments.seed,
        "kills": sum(soaked.kills.values()),
        "targets": dict(sorted(soaked.kills.items())),
        "resizes": soaked.resizes,
        "runs": soaked.finished + 1,
        "seconds": round(time.monotonic() - began),
        "sha256": result,
    }
    print(json.dumps(entry))
    if arguments.result:
        write_result(arguments.result, machine, entry)


if __name__ == "__main__":
    main()
