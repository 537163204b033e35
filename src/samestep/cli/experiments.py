"""`samestep verify`, `diff`, `bench` and `profile`: comparisons and measurements of runs.

The tools are imported by the commands that use them: some import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from samestep.cli.batch_options import BatchOptions
from samestep.cli.commands import PRELOAD
from samestep.cli.launch_options import LaunchOptions, gpu_names
from samestep.cli.options import (
    DeviceOption,
    JsonOption,
    RecipeOptions,
    StrategyOptions,
    SubjectOptions,
    WorkersOption,
    argument,
    count,
    integers,
    names,
    option,
    option_conflict,
    options_of,
    output_folder,
    parse_strategy,
)
from samestep.cli.run_plans import load_resolved
from samestep.config import Recipe, RunOptions, resolve_mesh
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.loggers.logger import to_json
from samestep.number_text import plural
from samestep.recipes.recipe_files import recipe_data
from samestep.report_text import printable
from samestep.runs import run_folder
from samestep.script.mode import imports_samestep
from samestep.tools import bench, learning_rates
from samestep.tools.launch import describe_machine

if TYPE_CHECKING:
    from samestep.tools.diff import Comparison
    from samestep.tools.verify.trials import Subject

_STEPS = 3
# Not from `torch.finfo`: this process does not import torch.
_ACCURACIES = {"fp16": 2.0**-10, "bf16": 2.0**-7}  # of gradients that ranks exchange


@dataclass(frozen=True, kw_only=True)
class Verify(JsonOption, DeviceOption, StrategyOptions, SubjectOptions):
    """Show that several numbers of processes give the same results, and write a certificate.

    The first steps, the last batch of the epoch and one evaluation of a recipe, or a complete
    script, run on each number of processes and are compared with those of the first number; those
    of a script that does not import samestep with plain Python. If results differ, experiments find
    the cause.
    Exit codes: 0 equal, 1 failed run, 2 invalid input, 3 different.
    """

    example: ClassVar = "samestep verify digits --processes 1,2,3,4 --kill-at 2 --resume-on 3"
    group: ClassVar = "comparison"

    processes: tuple[int, ...] = option(
        "numbers of ranks; the first is the reference",
        "N,N,...",
        default=(1, 2, 3, 4),
        type=integers,
    )
    steps: int | None = option(f"optimizer steps (default {_STEPS}; for a script, all)", "N")
    exact: bool = option(
        "require equal bits; a recipe and an unchanged script run with the reduction exact",
        default=False,
    )
    double: bool = option("use float64, which separates rounding from wrong results", default=False)
    kill_at: int | None = option("also kill a rank in this step, and resume", "STEP")
    resume_on: int | None = option("number of processes after the kill", "N")
    patience: float = option("limit without progress", "SECONDS", default=120, type=float)
    out: Path | None = option("folder of the certificate (default runs/verify-...)", "DIR")

    def run(self) -> int:
        """Verify and print; return 0 if results are equal, otherwise 3."""
        from samestep.tools.verify import verification

        subject = self._subject()
        conditions = self._conditions(subject.recipe)
        with output_folder(self.out, f"verify-{Path(subject.name).stem}") as folder:
            data = verification.verify(
                subject,
                self.processes,
                conditions,
                folder,
                kill_at=self.kill_at,
                resume_on=self.resume_on,
                preload=PRELOAD,
                progress=lambda text: self.note(f"running {subject.name} on {text}"),
            )
            verification.write_certificate(data, folder)
        certificate = folder / "certificate.json"
        texts = [
            verification.table(data),
            verification.calls_text(data),
            verification.explanation(data),
            verification.summary(data),
        ]
        lines = ["\n\n".join(filter(None, texts)), f"certificate  {certificate}, certificate.html"]
        self.result({**data, "certificate": str(certificate)}, *lines)
        if data["holds"]:
            return EXIT_DONE
        return EXIT_DIFFERS

    def _subject(self) -> Subject:
        from samestep.tools.verify.trials import Subject

        script = self.script()
        if script is not None:
            return Subject(
                name=script.name,
                script=script,
                arguments=tuple(self.script_arguments),
                is_unchanged=not imports_samestep(script),
            )
        overrides = self.strategy_overrides()
        if self.exact:
            overrides.append("step.reduction=exact")
        recipe = load_resolved(self.recipe, [*overrides, *self.overrides], self.note)
        return Subject(name=Path(self.recipe).stem, recipe=recipe)

    def _conditions(self, recipe: Recipe | None) -> Any:
        """Return the conditions of all trials, after a check of the options."""
        from samestep.tools.verify.trials import Conditions, Interventions

        if (self.kill_at is None) != (self.resume_on is None):
            value = "only one of --kill-at and --resume-on"
            raise option_conflict(value, "--kill-at 2 --resume-on 3")
        steps = self.steps
        requires_bits = None
        accuracy = 0.0
        if recipe is not None:
            steps = self.steps or _STEPS
            if self.kill_at is not None and self.kill_at > steps:
                value = f"--kill-at {self.kill_at}"
                raise InputError(value, f"one of {steps} steps", "increase --steps", code="E_VALUE")
            for number in (*self.processes, self.resume_on or 1):
                if number > 1:  # one process has no mesh
                    resolve_mesh(recipe.strategy, number, recipe.microbatch_count)
            is_exact = recipe.strategy.is_exact(recipe.step.tensor_slices)
            requires_bits = recipe.step.reduction == "exact" and is_exact
            accuracy = _ACCURACIES.get(recipe.strategy.hook, 0.0)
        elif self.exact:
            requires_bits = True
        return Conditions(
            steps=steps,
            device=self.device,
            interventions=Interventions(double=self.double),
            requires_bits=requires_bits,
            accuracy=accuracy,
            patience=self.patience,
        )


@dataclass(frozen=True, kw_only=True)
class Diff(JsonOption):
    """Find the first difference of two runs.

    Their recipes, environments and logged checksums are compared. The runs are only read.
    Exit codes: 0 equal, 2 invalid input, 3 different.
    """

    example: ClassVar = "samestep diff runs/first runs/second"

    folders: Sequence[Path] = argument(
        "RUN", "names or directories of two runs", nargs=2, type=run_folder
    )

    def run(self) -> int:
        """Compare and print; return 0 without a difference, otherwise 3."""
        from samestep.tools.diff import compare_logs
        from samestep.tools.run_log import read_runs

        runs = read_runs(self.folders)
        logs = compare_logs(*runs)
        equal = logs.first_different is None and logs.compared > 0
        texts = []
        for title, values in _compared(logs).items():
            for label, line in zip([title, *[""] * len(values)], values or ["equal"], strict=False):
                texts.append(f"{label:<14}{printable(line)}")
        data = {"runs": [str(run.folder) for run in runs], "equal": equal}
        self.result({**data, **asdict(logs)}, *texts)
        if equal:
            return EXIT_DONE
        return EXIT_DIFFERS


def _compared(logs: Comparison) -> dict[str, list[str]]:
    checksums = "no steps with checksums of both runs"
    if logs.first_different is not None:
        last = logs.last_equal
        checksums = f"equal up to step {last}, different after step {logs.first_different}"
    elif logs.compared:
        steps = plural(logs.compared, "step")
        checksums = f"equal after {steps}, the last one is step {logs.last_equal}"
    return {"recipes": logs.recipe, "environment": logs.environment, "checksums": [checksums]}


def _ways(text: str) -> tuple[str, ...]:
    for name in names(text):
        if name not in bench.WAYS:
            expected = f"some of {', '.join(bench.WAYS)}"
            raise InputError(f"--ways {name}", expected, f"--ways {bench.WAYS[0]}", code="E_VALUE")
    return names(text)


@dataclass(frozen=True, kw_only=True)
class Bench(JsonOption, WorkersOption, DeviceOption, RecipeOptions):
    """Compare the ways to train a recipe on this machine.

    The ways are one device, DDP and nn.DataParallel on several devices, batches in parts, bf16,
    compressed gradients, the exact reduction, batch norm of each rank, and additional strategies.
    All are trained, then timed in turn. Ways that cannot run here are listed with the reason.
    """

    example: ClassVar = "samestep bench digits --devices 1,2 --layout fsdp --epochs 1 --rounds 2"

    devices: tuple[int, ...] | None = option(
        "numbers of devices, one rank each (default 1,2,4)",
        "N,N,...",
        type=integers,
    )
    layout: Sequence[str] = option(
        "additional strategy, such as fsdp or hsdp:shard=2 (docs/guides/strategies/index.md); can "
        "be repeated",
        "NAME[:AXIS=N,...]",
        default=(),
        action="append",
    )
    ways: tuple[str, ...] = option(
        "ways next to one device and the layouts", "NAME,...", default=bench.WAYS, type=_ways
    )
    accumulate: tuple[int, ...] | None = option(
        "parts of a batch, each a way with the same batch size "
        f"(default {','.join(map(str, bench.ACCUMULATE))})",
        "K,K,...",
        type=integers,
    )
    epochs: int | None = option(
        "training epochs before the evaluation of each way (default: the recipe's; 0: no "
        "evaluation)",
        "E",
        type=count,
    )
    rounds: int = option("trials of each way, interleaved", "N", default=5)
    steps: int | None = option(
        f"steps of a trial (default {bench.STEPS}), or of --lr (default {learning_rates.STEPS})",
        "N",
    )
    lr: bool = option(
        "find a learning rate instead: steps with a growing rate, on the first of --devices",
        default=False,
    )
    out: Path | None = option("folder for bench.json (default runs/bench-...)", "DIR")

    def run(self) -> int:
        """Compare and print."""
        recipe = load_resolved(self.recipe, self.overrides, self.note)
        if self.lr:
            return self._find_rate(recipe)
        gpus = [] if self.device == "cpu" else gpu_names()
        strategies = [parse_strategy(text) for text in self.layout]
        # `--accumulate` selects its variants also without their name.
        ways = self.ways if self.accumulate is None else (*self.ways, "accumulate")
        variants, absent = bench.contenders(
            recipe,
            self.devices or bench.DEVICES,
            strategies,
            len(gpus) or None,
            ways=ways,
            accumulate=self.accumulate or bench.ACCUMULATE,
        )
        options = RunOptions(device=self.device, workers=self.workers, quiet=self.json)
        epochs = recipe.epochs if self.epochs is None else self.epochs
        plan = bench.Plan(
            rounds=self.rounds,
            steps=self.steps or bench.STEPS,
            epochs=epochs,
            options=options,
            preload=PRELOAD,
        )
        with output_folder(self.out, f"bench-{Path(self.recipe).stem}") as folder:
            facts = {"recipe": recipe_data(recipe), "machine": describe_machine(gpus)}
            data = {**facts, **bench.compare(variants, absent, plan, self.note)}
            (folder / "bench.json").write_text(to_json(data), encoding="utf-8")
        if not self.json:
            bench.show(data)
        self.result({**data, "folder": str(folder)}, f"written     {folder / 'bench.json'}")
        return EXIT_DONE

    def _find_rate(self, recipe: Recipe) -> int:
        """Train with growing rates, and print a suggestion."""
        for name in ("layout", "accumulate", "epochs", "out"):
            if getattr(self, name):
                raise option_conflict(f"--{name} with --lr")
        options = RunOptions(device=self.device, workers=self.workers, quiet=self.json)
        processes = self.devices[0] if self.devices else 1
        steps = self.steps or learning_rates.STEPS
        self.note(f"training {steps} steps with growing learning rates")
        data = learning_rates.find(recipe, options, steps, processes, PRELOAD)
        self.result(data, *learning_rates.lines_of(data))
        return EXIT_DONE


@dataclass(frozen=True, kw_only=True)
class Profile(
    JsonOption, BatchOptions, StrategyOptions, WorkersOption, LaunchOptions, SubjectOptions
):
    """Train some steps of a recipe or a script and measure their phases.

    The phases are data loading, forward, backward, communication and optimizer; the slowest rank is
    named. Traces for Perfetto and TensorBoard are written.
    """

    example: ClassVar = "samestep profile digits --processes 2 --active 20"
    group: ClassVar = "measurement"

    warmup: int = option("unmeasured steps at the start", "N", default=4, type=count)
    active: int = option("measured steps", "N", default=20)
    traced: int = option(
        "following steps with torch's profiler (default 3; 0: none)", "N", default=3, type=count
    )
    out: Path | None = option(
        "folder for profile.json and traces (default runs/profile-...)", "DIR"
    )

    def run(self) -> int:
        """Train, measure and print."""
        from samestep.tools import profile

        script = self.script()
        subject: Any
        if script is not None:
            subject = profile.Script(script, tuple(self.script_arguments))
            _, processes = self.process_range()
        else:
            overrides = [*self.strategy_overrides(), *self.overrides]
            overrides = self.batch_overrides(overrides, self.size)
            subject = load_resolved(self.recipe, overrides, self.note)
            _, processes = self.process_range(subject)
        stem = Path(self.recipe).stem
        with output_folder(self.out, f"profile-{stem}") as folder:
            options = options_of(RunOptions, self, quiet=self.json)
            plan = options_of(profile.Plan, self, folder=folder, options=options)
            self.note(f"training {plan.steps} steps of {stem} on {plural(processes, 'rank')}")
            gpus = [] if self.device == "cpu" else gpu_names()
            machine = describe_machine(gpus)  # with the load before the measurement
            environment = self.environment or {}
            measured = profile.profile(subject, plan, processes, PRELOAD, environment)
            data = profile.profile_data(subject, plan, measured, machine)
            (folder / "profile.json").write_text(to_json(data), encoding="utf-8")
        if self.json:
            self.result({**data, "folder": str(folder)})
        else:
            profile.show(plan, measured)
        return EXIT_DONE
