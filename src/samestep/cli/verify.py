"""`samestep verify`: show that N processes compute what one does, and name the cause where they do not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli import layouts, member, options, ranks
from samestep.config import Recipe, settle
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.recipes.parse import load_recipe, shipped_recipes
from samestep.tools.verify.lab import Conditions
from samestep.tools.verify.plan import Held, Subject

_STEPS = 3
# Rounding of sums in another order, after a few steps; in float64 what the project promises of gradients.
_TOLERANCES = {True: 1e-12, False: 1e-4}
# Gradients of 11 and of 8 bits are 7e-4 and 6e-3 apart in a first step; later a ReLU may be on in one run and off in
# the other.
_OF_HOOK = {"fp16": 0.1, "bf16": 0.5}


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "verify",
        help="show that N processes compute what one does",
        description="Run the first steps, the last batch of the epoch and one evaluation of a recipe (or a whole "
        "script) on several numbers of processes, compare everything that is computed with the first of them, and "
        "write a certificate. Where something differs, find the cause by experiments.",
        epilog="examples: samestep verify digits --processes 1,2,3,4 --kill-at 2 --resume-on 3; "
        "samestep verify --script train.py --processes 1,2 -- --epochs 1. "
        "Exit codes: 0 it holds, 1 a run failed, 2 the input was wrong, 3 it does not hold.",
    )
    parser.add_argument("recipe", nargs="?", help=f"{', '.join(shipped_recipes())}, or a YAML file")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="of the script, after --")
    parser.add_argument("--script", type=Path, help="a script of your own, in place of a recipe")
    options.add_set_option(parser)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--processes",
        default="1,2,3,4",
        metavar="N,N,...",
        help="numbers of ranks; the first is the reference (default 1,2,3,4)",
    )
    group.add_argument("--steps", type=int, help=f"optimizer steps (default {_STEPS}; of a script, all)")
    group.add_argument(
        "--reduction",
        choices=("exact", "fast"),
        help="exact asks for the same bits, fast for a small distance (default: what the recipe says; exact)",
    )
    group.add_argument("--double", action="store_true", help="in float64, which tells rounding from wrong mathematics")
    group.add_argument(
        "--tolerance", type=float, help="largest distance under fast, relative (default 1e-12 in float64, else 1e-4)"
    )
    group.add_argument("--kill-at", type=int, metavar="STEP", help="also kill a rank in this step, and resume")
    group.add_argument("--resume-on", type=int, metavar="N", help="number of processes after the kill")
    group.add_argument(
        "--loss-of-shards", action="store_true", help="do not ask whether a shard's loss is the sum of its pieces"
    )
    layouts.add_options(parser)
    group = parser.add_argument_group("machine")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where ranks compute")
    group.add_argument(
        "--patience", type=float, default=120.0, metavar="SECONDS", help="without progress (default 120)"
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="where the certificate goes (default runs/verify-...)")
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify and print; 0 if it holds, 3 if not."""
    # Imported here: the other commands have no use for them.
    from rich.console import Console

    from samestep.tools.verify.certificate import certificate_data, explanation, summary, table, write_certificate
    from samestep.tools.verify.verification import verify

    member.refuse_launchers("verify")
    subject = _subject(arguments)
    processes = options.numbers("--processes", arguments.processes)
    _check(arguments, subject, processes)
    console = Console(stderr=True, quiet=arguments.json)
    with options.new_folder(arguments.out, f"verify-{Path(subject.name).stem}") as folder:
        found = verify(
            subject,
            processes,
            _conditions(arguments, subject.recipe),
            folder,
            kill_at=arguments.kill_at,
            resume_on=arguments.resume_on,
            checks_losses=not arguments.loss_of_shards,
            preload=ranks.EVALUATING,
            tell=lambda text: console.print(f"running {subject.name} on {text}", highlight=False, soft_wrap=True),
        )
    data = certificate_data(found)
    write_certificate(data, folder)
    if arguments.json:
        options.print_json({**data, "certificate": str(folder / "certificate.json")})
    else:
        texts = [table(data), explanation(data), summary(data)]
        print("\n\n".join(text for text in texts if text))
        print(f"certificate  {folder / 'certificate.json'}, certificate.html beside it")
    return EXIT_DONE if found.holds else EXIT_DIFFERS


def _subject(arguments: argparse.Namespace) -> Subject:
    if arguments.script is not None:
        given = [arguments.recipe] if arguments.recipe is not None else []
        if arguments.overrides:
            raise InputError("--set with --script", rule="--set is of recipes", do="give the script its own arguments")
        if not arguments.script.is_file():
            raise InputError(f"there is no file {arguments.script}", rule="--script FILE", do="look at the path")
        return Subject(
            name=arguments.script.name, script=arguments.script, arguments=tuple([*given, *arguments.arguments])
        )
    if arguments.recipe is None or arguments.arguments:
        raise InputError(
            "one recipe, or --script FILE, is needed",
            rule="samestep verify RECIPE, or samestep verify --script FILE -- ARGUMENTS",
            do="samestep verify digits",
        )
    recipe = load_recipe(arguments.recipe, [*layouts.overrides(arguments), *arguments.overrides])
    return Subject(name=Path(arguments.recipe).stem, recipe=recipe)


def _check(arguments: argparse.Namespace, subject: Subject, processes: list[int]) -> None:
    """What can be refused before anything runs."""
    if arguments.steps is not None and arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps}", rule="at least 1 step", do=f"--steps {_STEPS}")
    if (arguments.kill_at is None) != (arguments.resume_on is None):
        raise InputError(
            "--kill-at and --resume-on belong together",
            rule="a run that is killed in a step goes on on a number of processes",
            do="--kill-at 2 --resume-on 3",
        )
    for name in ("tolerance", "patience"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise InputError(f"--{name} {value:g}", rule="above 0", do=f"leave --{name} out for its default")
    steps = arguments.steps or _STEPS
    if arguments.kill_at is not None and not 1 <= arguments.kill_at <= steps and subject.recipe is not None:
        raise InputError(
            f"--kill-at {arguments.kill_at}",
            rule=f"one of the steps, 1 to {steps}",
            do="raise --steps, or kill earlier",
        )
    if subject.recipe is not None:
        for number in [*processes, *([arguments.resume_on] if arguments.resume_on else [])]:
            if number > 1:  # one process has nothing to divide
                settle(subject.recipe.strategy, number, subject.recipe.shards)


def _conditions(arguments: argparse.Namespace, recipe: Recipe | None) -> Conditions:
    asked = arguments.reduction or (recipe.step.reduction if recipe else "exact")
    if recipe is not None and not recipe.strategy.is_exact:
        asked = "fast"
    tolerance = None
    if asked == "fast":
        tolerance = arguments.tolerance if arguments.tolerance is not None else _tolerance(arguments.double, recipe)
    elif arguments.tolerance is not None:
        raise InputError(
            "--tolerance with an exact reduction", rule="exact asks for the same bits", do="--reduction fast"
        )
    # A script says itself how gradients meet; a recipe can be asked for either.
    held = Held(double=arguments.double, reduction=arguments.reduction if recipe else None)
    steps = arguments.steps if recipe is None else (arguments.steps or _STEPS)
    return Conditions(steps=steps, device=arguments.device, held=held, tolerance=tolerance, patience=arguments.patience)


def _tolerance(double: bool, recipe: Recipe | None) -> float:
    hook = recipe.strategy.hook if recipe is not None else "none"
    if hook == "powersgd":
        raise InputError(
            "strategy.hook powersgd without --tolerance",
            rule="what it sends is an approximation, and how good it is depends on the model",
            do="--tolerance 2, or --set strategy.hook=none",
        )
    return _OF_HOOK[hook] if hook in _OF_HOOK else _TOLERANCES[double]
