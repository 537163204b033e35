"""`samestep verify`: comparison of one and N processes, with the cause of every difference."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from samestep.cli.commands import PRELOAD
from samestep.cli.external_launcher import require_single_process
from samestep.cli.options import (
    add_number,
    add_options,
    add_subject_argument,
    option_conflict,
    output_folder,
    parse_integers,
    print_json,
    progress,
    script_of,
)
from samestep.cli.recipe_options import add_strategy_options, all_overrides, load_with_microbatches
from samestep.config import Recipe, resolve_mesh
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.tools.verify.trials import Conditions, Interventions, Subject

_STEPS = 3
# Rounding of sums in another order, after a few steps; in float64, the promise of the project for gradients.
_TOLERANCES = {True: 1e-12, False: 1e-4}
# Gradients of 11 and of 8 bits differ by 7e-4 and 6e-3 in a first step; later, a ReLU can be on in one run and off in
# the other.
_HOOK_TOLERANCES = {"fp16": 0.1, "bf16": 0.5}


def add_verify(add_parser: Any) -> None:
    """Add `samestep verify`."""
    parser = add_parser(
        description="Run the first steps, the last batch of the epoch and one evaluation of a recipe (or a complete "
        "script) on several numbers of processes, compare all results with those of the first number, and write a "
        "certificate. If results differ, find the cause by experiments.",
        epilog="examples: samestep verify digits --processes 1,2,3,4 --kill-at 2 --resume-on 3; "
        "samestep verify train.py --processes 1,2 -- --epochs 1. "
        "Exit codes: 0 equal, 1 failed run, 2 invalid input, 3 different.",
    )
    add_subject_argument(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--processes",
        type=partial(parse_integers, "--processes"),
        default="1,2,3,4",
        metavar="N,N,...",
        help="numbers of ranks; the first is the reference (default 1,2,3,4)",
    )
    add_number(group, "--steps", help=f"optimizer steps (default {_STEPS}; for a script, all)")
    text = "exact requires equal bits, fast a small distance (default: the recipe's, or exact)"
    group.add_argument("--reduction", choices=("exact", "fast"), help=text)
    group.add_argument("--double", action="store_true", help="use float64, which separates rounding from wrong results")
    text = "largest relative distance under fast (default 1e-12 in float64, else 1e-4)"
    add_number(group, "--tolerance", type=float, help=text)
    group.add_argument("--kill-at", type=int, metavar="STEP", help="also kill a rank in this step, and resume")
    add_number(group, "--resume-on", metavar="N", help="number of processes after the kill")
    text = "do not check that the loss of a microbatch is the sum over its samples"
    group.add_argument("--loss-of-microbatches", action="store_true", help=text)
    add_strategy_options(parser)
    group = parser.add_argument_group("machine")
    add_options(group, "--device")
    text = "limit without progress (default 120)"
    add_number(group, "--patience", type=float, default=120.0, metavar="SECONDS", help=text)
    group.add_argument("--out", type=Path, metavar="DIR", help="folder of the certificate (default runs/verify-...)")
    add_options(parser, "--json")
    parser.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    """Verify and print; return 0 if results are equal, otherwise 3."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.verify.verification import explanation, summary, table, verify, write_certificate

    require_single_process("verify")
    subject = _subject(arguments)
    _check(arguments, subject.recipe)
    report = progress(arguments)
    with output_folder(arguments.out, f"verify-{Path(subject.name).stem}") as folder:
        data = verify(
            subject,
            arguments.processes,
            _conditions(arguments, subject.recipe),
            folder,
            kill_at=arguments.kill_at,
            resume_on=arguments.resume_on,
            checks_additivity=not arguments.loss_of_microbatches,
            preload=PRELOAD,
            progress=lambda text: report(f"running {subject.name} on {text}"),
        )
        write_certificate(data, folder)
    if arguments.json:
        print_json({**data, "certificate": str(folder / "certificate.json")})
    else:
        texts = [table(data), explanation(data), summary(data)]
        print("\n\n".join(text for text in texts if text))
        print(f"certificate  {folder / 'certificate.json'}, certificate.html")
    return EXIT_DONE if data["holds"] else EXIT_DIFFERS


def _subject(arguments: argparse.Namespace) -> Subject:
    script = script_of(arguments)
    if script is not None:
        return Subject(name=script.name, script=script, arguments=tuple(arguments.script_arguments))
    recipe = load_with_microbatches(arguments, all_overrides(arguments))
    return Subject(name=Path(arguments.recipe).stem, recipe=recipe)


def _check(arguments: argparse.Namespace, recipe: Recipe | None) -> None:
    """Reject invalid options before a trial runs."""
    if (arguments.kill_at is None) != (arguments.resume_on is None):
        expected = "both: the step of the kill, and the number of processes afterwards"
        raise option_conflict("only one of --kill-at and --resume-on", expected, "--kill-at 2 --resume-on 3")
    if recipe is None:
        return
    steps = arguments.steps or _STEPS
    if arguments.kill_at is not None and not 1 <= arguments.kill_at <= steps:
        raise InputError(
            f"--kill-at {arguments.kill_at}",
            expected=f"one of the steps, 1 to {steps}",
            fix="increase --steps, or use an earlier step",
            code="E_VALUE",
        )
    for number in (*arguments.processes, arguments.resume_on or 1):
        if number > 1:  # one process has no mesh
            resolve_mesh(recipe.strategy, number, recipe.microbatch_count, recipe.batch_size)


def _conditions(arguments: argparse.Namespace, recipe: Recipe | None) -> Conditions:
    reduction = arguments.reduction or (recipe.step.reduction if recipe else "exact")
    if recipe is not None and not recipe.strategy.is_exact(recipe.step.tensor_slices):
        reduction = "fast"
    tolerance = arguments.tolerance
    if reduction == "fast":
        hook = recipe.strategy.hook if recipe is not None else "none"
        tolerance = _default_tolerance(hook, double=arguments.double) if tolerance is None else tolerance
    elif tolerance is not None:
        raise option_conflict("--tolerance with an exact reduction", "equal bits under exact", "--reduction fast")
    # A script selects its reduction itself; a recipe can be verified with either.
    interventions = Interventions(double=arguments.double, reduction=arguments.reduction if recipe else None)
    return Conditions(
        steps=arguments.steps if recipe is None else (arguments.steps or _STEPS),
        device=arguments.device,
        interventions=interventions,
        tolerance=tolerance,
        patience=arguments.patience,
    )


def _default_tolerance(hook: str, *, double: bool) -> float:
    """Return the default of `--tolerance`: the largest relative distance of equal results under `fast`.

    Args:
        hook: compression of gradients, as in `strategy.hook` of recipes.
        double: the trials compute in float64.
    """
    return _HOOK_TOLERANCES[hook] if hook in _HOOK_TOLERANCES else _TOLERANCES[double]
