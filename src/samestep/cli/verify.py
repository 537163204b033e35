"""`samestep verify`: comparison of one and N processes, with the cause of every difference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from samestep.cli.commands import PRELOAD
from samestep.cli.options import (
    DeviceOption,
    JsonOption,
    integers,
    option,
    option_conflict,
    output_folder,
)
from samestep.cli.recipe_options import StrategyOptions, SubjectOptions, load_resolved
from samestep.config import Recipe, resolve_mesh
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.script.mode import imports_samestep
from samestep.tools.verify.trials import Conditions, Interventions, Subject

_STEPS = 3
_ACCURACIES = {"fp16": 2.0**-10, "bf16": 2.0**-7}  # of gradients that ranks exchange


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, DeviceOption, StrategyOptions, SubjectOptions):
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
        "numbers of ranks; the first is the reference (default 1,2,3,4)",
        "N,N,...",
        default=(1, 2, 3, 4),
        type=integers,
    )
    steps: int | None = option(f"optimizer steps (default {_STEPS}; for a script, all)", "N")
    reduction: Literal["exact", "fast"] | None = option(
        "exact requires equal bits, fast equality to rounding; a recipe runs with it (default: the subject's)"
    )
    exact: bool = option(
        "the same as --reduction exact; an unchanged script runs with it", default=False
    )
    double: bool = option("use float64, which separates rounding from wrong results", default=False)
    kill_at: int | None = option("also kill a rank in this step, and resume", "STEP")
    resume_on: int | None = option("number of processes after the kill", "N")
    patience: float = option(
        "limit without progress (default 120)", "SECONDS", default=120.0, type=float
    )
    out: Path | None = option("folder of the certificate (default runs/verify-...)", "DIR")


def run(options: Options) -> int:
    """Verify and print; return 0 if results are equal, otherwise 3."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.verify.verification import (
        calls_text,
        explanation,
        summary,
        table,
        verify,
        write_certificate,
    )

    if options.exact and options.reduction == "fast":
        raise option_conflict("--exact and --reduction fast")
    options = replace(options, reduction="exact" if options.exact else options.reduction)
    subject = _subject(options)
    _check(options, subject.recipe)
    with output_folder(options.out, f"verify-{Path(subject.name).stem}") as folder:
        data = verify(
            subject,
            options.processes,
            _conditions(options, subject.recipe),
            folder,
            kill_at=options.kill_at,
            resume_on=options.resume_on,
            preload=PRELOAD,
            progress=lambda text: options.note(f"running {subject.name} on {text}"),
        )
        write_certificate(data, folder)
    certificate = folder / "certificate.json"
    texts = [
        text for text in (table(data), calls_text(data), explanation(data), summary(data)) if text
    ]
    lines = ["\n\n".join(texts), f"certificate  {certificate}, certificate.html"]
    options.result({**data, "certificate": str(certificate)}, *lines)
    if data["holds"]:
        return EXIT_DONE
    return EXIT_DIFFERS


def _subject(options: Options) -> Subject:
    script = options.script()
    if script is not None:
        is_unchanged = not imports_samestep(script)
        arguments = tuple(options.script_arguments)
        return Subject(
            name=script.name, script=script, arguments=arguments, is_unchanged=is_unchanged
        )
    reduction = [] if options.reduction is None else [f"step.reduction={options.reduction}"]
    overrides = [*options.strategy_overrides(), *reduction, *options.overrides]
    recipe = load_resolved(options.recipe, overrides, options.note)
    return Subject(name=Path(options.recipe).stem, recipe=recipe)


def _check(options: Options, recipe: Recipe | None) -> None:
    """Reject invalid options before a trial runs."""
    if (options.kill_at is None) != (options.resume_on is None):
        raise option_conflict("only one of --kill-at and --resume-on", "--kill-at 2 --resume-on 3")
    if recipe is None:
        return
    steps = options.steps or _STEPS
    if options.kill_at is not None and options.kill_at > steps:
        raise InputError(
            f"--kill-at {options.kill_at}",
            f"one of {steps} steps",
            "increase --steps",
            code="E_VALUE",
        )
    for number in (*options.processes, options.resume_on or 1):
        if number > 1:  # one process has no mesh
            resolve_mesh(recipe.strategy, number, recipe.microbatch_count)


def _conditions(options: Options, recipe: Recipe | None) -> Conditions:
    steps = options.steps
    requires_bits = None
    accuracy = 0.0
    if recipe is not None:
        steps = options.steps or _STEPS
        requires_bits = recipe.step.reduction == "exact" and recipe.strategy.is_exact(
            recipe.step.tensor_slices
        )
        accuracy = _ACCURACIES.get(recipe.strategy.hook, 0.0)
    elif options.reduction is not None:
        requires_bits = options.reduction == "exact"
    return Conditions(
        steps=steps,
        device=options.device,
        interventions=Interventions(double=options.double),
        requires_bits=requires_bits,
        accuracy=accuracy,
        patience=options.patience,
    )
