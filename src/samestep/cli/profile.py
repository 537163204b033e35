"""`samestep profile`: phases of a step, and the slowest rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from samestep.cli.commands import PRELOAD
from samestep.cli.launch_options import LoaderOptions, gpu_names
from samestep.cli.options import JsonOption, count, option, options_of, output_folder
from samestep.cli.recipe_options import BatchOptions, StrategyOptions, SubjectOptions, load_resolved
from samestep.config import Recipe, RunOptions
from samestep.errors import EXIT_DONE
from samestep.loggers.logger import to_json
from samestep.units import plural


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, BatchOptions, StrategyOptions, LoaderOptions, SubjectOptions):
    """Train some steps of a recipe or a script and measure their phases.

    The phases are data loading, forward, backward, communication and optimizer; the slowest rank is
    named. Traces for Perfetto and TensorBoard are written.
    """

    example: ClassVar = "samestep profile digits --processes 2 --active 20"
    group: ClassVar = "measurement"

    warmup: int = option("unmeasured steps at the start (default 4)", "N", default=4, type=count)
    active: int = option("measured steps (default 20)", "N", default=20)
    traced: int = option(
        "following steps with torch's profiler (default 3; 0: none)", "N", default=3, type=count
    )
    out: Path | None = option(
        "folder for profile.json and traces (default runs/profile-...)", "DIR"
    )


def run(options: Options) -> int:
    """Train, measure and print."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.launch import describe_machine
    from samestep.tools.profile import Plan, Script, profile, profile_data, show

    script = options.script()
    if script is not None:
        subject: Recipe | Script = Script(script, tuple(options.script_arguments))
        _, processes = options.process_range()
    else:
        overrides = options.batch_overrides(
            [*options.strategy_overrides(), *options.overrides], options.size
        )
        subject = load_resolved(options.recipe, overrides, options.note)
        _, processes = options.process_range(subject)
    stem = Path(options.recipe).stem
    with output_folder(options.out, f"profile-{stem}") as folder:
        plan = options_of(
            Plan,
            options,
            folder=folder,
            options=options_of(RunOptions, options, quiet=options.json),
        )
        options.note(f"training {plan.steps} steps of {stem} on {plural(processes, 'rank')}")
        machine = describe_machine([] if options.device == "cpu" else gpu_names())
        measured = profile(subject, plan, processes, PRELOAD, options.environment or {})
        data = profile_data(subject, plan, measured, machine)
        (folder / "profile.json").write_text(to_json(data), encoding="utf-8")
    if options.json:
        options.result({**data, "folder": str(folder)})
    else:
        show(plan, measured)
    return EXIT_DONE
