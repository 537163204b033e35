"""`samestep verify`: comparison of one and N processes, with the cause of every difference."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from samestep.cli.commands import PRELOAD
from samestep.cli.options import DeviceOption, JsonOption, integers, option, option_conflict, output_folder
from samestep.cli.recipe_options import StrategyOptions, SubjectOptions, load_resolved
from samestep.config import Recipe, resolve_mesh
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.tools.verify_engine.trials import Conditions, Interventions, Subject

_STEPS = 3
# Rounding of sums in another order, after a few steps; in float64, the promise of the project for gradients.
_TOLERANCES = {True: 1e-12, False: 1e-4}
# Gradients of 11 and of 8 bits differ by 7e-4 and 6e-3 in a first step; later, a ReLU can be on in one run and off in
# the other.
_USES_ENGINE = re.compile(r"samestep\.(Engine|start|MicrobatchLoop|integrations)\b|import .*\b(Engine|start)\b")
_HOOK_TOLERANCES = {"fp16": 0.1, "bf16": 0.5}


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, DeviceOption, StrategyOptions, SubjectOptions):
    """Show that several numbers of processes give the same results, and write a certificate.

    The first steps, the last batch of the epoch and one evaluation of a recipe, or a complete script, run on each
    number of processes and are compared with those of the first number. If results differ, experiments find the cause.
    Exit codes: 0 equal, 1 failed run, 2 invalid input, 3 different.
    """

    example: ClassVar = "samestep verify digits --processes 1,2,3,4 --kill-at 2 --resume-on 3"
    group: ClassVar = "comparison"

    processes: tuple[int, ...] = option(
        "numbers of ranks; the first is the reference (default 1,2,3,4)", "N,N,...", default=(1, 2, 3, 4), type=integers
    )
    steps: int | None = option(f"optimizer steps (default {_STEPS}; for a script, all)", "N")
    reduction: Literal["exact", "fast"] | None = option(
        "exact requires equal bits, fast a small distance (default: the recipe's, or exact)"
    )
    double: bool = option("use float64, which separates rounding from wrong results", default=False)
    kill_at: int | None = option("also kill a rank in this step, and resume", "STEP")
    resume_on: int | None = option("number of processes after the kill", "N")
    loss_of_microbatches: bool = option(
        "do not check that the loss of a microbatch is the sum over its samples", default=False
    )
    patience: float = option("limit without progress (default 120)", "SECONDS", default=120.0, type=float)
    out: Path | None = option("folder of the certificate (default runs/verify-...)", "DIR")


def run(options: Options) -> int:
    """Verify and print; return 0 if results are equal, otherwise 3."""
    script = options.script()
    if script is None or _USES_ENGINE.search(script.read_text(encoding="utf-8")):
        return _run_with_engine(options)
    # Imported here: the other commands do not need these modules.
    from samestep.tools.verify.trials import Conditions as ScriptConditions
    from samestep.tools.verify.trials import Interventions as ScriptInterventions
    from samestep.tools.verify.trials import Subject as ScriptSubject
    from samestep.tools.verify.verification import calls_text, explanation, summary, table, verify, write_certificate

    _check(options, None)
    conditions = ScriptConditions(
        steps=options.steps,
        interventions=ScriptInterventions(double=options.double),
        requires_bits=None if options.reduction is None else options.reduction == "exact",
        patience=options.patience,
    )
    with output_folder(options.out, f"verify-{script.stem}") as folder:
        data = verify(
            ScriptSubject(name=script.name, script=script, arguments=tuple(options.script_arguments)),
            options.processes,
            conditions,
            folder,
            kill_at=options.kill_at,
            resume_on=options.resume_on,
            preload=PRELOAD,
            progress=lambda text: options.note(f"running {script.name} on {text}"),
        )
        write_certificate(data, folder)
    certificate = folder / "certificate.json"
    texts = [text for text in (table(data), calls_text(data), explanation(data), summary(data)) if text]
    lines = ["\n\n".join(texts), f"certificate  {certificate}, certificate.html"]
    options.result({**data, "certificate": str(certificate)}, *lines)
    return EXIT_DONE if data["holds"] else EXIT_DIFFERS


def _run_with_engine(options: Options) -> int:
    """Verify a recipe, or a script with `samestep.Engine`."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.verify_engine.verification import explanation, summary, table, verify, write_certificate

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
            checks_additivity=not options.loss_of_microbatches,
            preload=PRELOAD,
            progress=lambda text: options.note(f"running {subject.name} on {text}"),
        )
        write_certificate(data, folder)
    certificate = folder / "certificate.json"
    texts = [text for text in (table(data), explanation(data), summary(data)) if text]
    lines = ["\n\n".join(texts), f"certificate  {certificate}, certificate.html"]
    options.result({**data, "certificate": str(certificate)}, *lines)
    return EXIT_DONE if data["holds"] else EXIT_DIFFERS


def _subject(options: Options) -> Subject:
    script = options.script()
    if script is not None:
        return Subject(name=script.name, script=script, arguments=tuple(options.script_arguments))
    recipe = load_resolved(options.recipe, [*options.strategy_overrides(), *options.overrides], options.note)
    return Subject(name=Path(options.recipe).stem, recipe=recipe)


def _check(options: Options, recipe: Recipe | None) -> None:
    """Reject invalid options before a trial runs."""
    if (options.kill_at is None) != (options.resume_on is None):
        raise option_conflict("only one of --kill-at and --resume-on", "--kill-at 2 --resume-on 3")
    if recipe is None:
        return
    steps = options.steps or _STEPS
    if options.kill_at is not None and options.kill_at > steps:
        raise InputError(f"--kill-at {options.kill_at}", f"one of {steps} steps", "increase --steps", code="E_VALUE")
    for number in (*options.processes, options.resume_on or 1):
        if number > 1:  # one process has no mesh
            resolve_mesh(recipe.strategy, number, recipe.microbatch_count)


def _conditions(options: Options, recipe: Recipe | None) -> Conditions:
    # A script selects its reduction itself; a recipe can be verified with either.
    interventions = Interventions(double=options.double, reduction=options.reduction if recipe else None)
    steps, is_fast = options.steps, options.reduction == "fast"
    tolerance = _TOLERANCES[options.double]
    if recipe is not None:
        steps = options.steps or _STEPS
        is_fast = (options.reduction or recipe.step.reduction) == "fast"
        is_fast = is_fast or not recipe.strategy.is_exact(recipe.step.tensor_slices)
        tolerance = _HOOK_TOLERANCES.get(recipe.strategy.hook, tolerance)
    return Conditions(
        steps=steps,
        device=options.device,
        interventions=interventions,
        tolerance=tolerance if is_fast else None,
        patience=options.patience,
    )
