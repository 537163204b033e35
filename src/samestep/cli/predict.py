"""`samestep predict`: what a trained model says of files, or how it goes on from a prompt."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli import member, options, ranks
from samestep.cli.opened import open_run
from samestep.config import RunOptions
from samestep.errors import EXIT_DONE, InputError
from samestep.recipes.facts import read_facts
from samestep.runtime.by_name import ByName
from samestep.runtime.crew import Terms
from samestep.runtime.launch import run_crew
from samestep.runtime.watchdog import HANG_AFTER

_MODULE = "samestep.recipes.predict"


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "predict",
        help="ask a trained model",
        description="Ask the model of a run about files (images, texts, as its recipe has them), or let a language "
        "model go on from a prompt. The data that it was trained on is not needed.",
        epilog="example: samestep predict runs/first picture.png",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="what to ask about")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best, last, or a step (default best)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where pictures of the answers go, for segmentation")
    parser.add_argument("--prompt", metavar="TEXT", help="go on from here, for language models")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="how far (default 100)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one answer a file, or the text."""
    member.refuse_launchers("predict")
    _check(arguments)
    recipe, checkpoint, _ = open_run(arguments.folder, arguments.checkpoint, [])
    facts = read_facts(arguments.folder)
    given = (recipe, RunOptions(device=arguments.device, quiet=True), facts, checkpoint)
    if arguments.prompt is not None:
        answer = _ask("complete", *given, arguments.prompt, arguments.tokens)
        options.print_json(answer) if arguments.json else print(answer["text"])
        return EXIT_DONE
    for answer in _ask("predict", *given, tuple(arguments.files), arguments.out):
        options.print_json(answer) if arguments.json else print("\n".join(_lines(answer)))
    return EXIT_DONE


def _check(arguments: argparse.Namespace) -> None:
    if (arguments.prompt is None) == (not arguments.files):
        raise InputError(
            "predict was given " + ("neither files nor a prompt" if arguments.prompt is None else "files and a prompt"),
            rule="files to ask about, or --prompt for a language model",
            do="samestep predict RUN FILE, or samestep predict RUN --prompt TEXT",
        )
    if arguments.tokens < 1:
        raise InputError(f"--tokens {arguments.tokens}", rule="1 or more", do="--tokens 100")
    missing = [file for file in arguments.files if not file.is_file()]
    if missing:
        raise InputError(f"{missing[0]} is not a file", rule="every FILE is there", do="look at the path")


def _ask(function: str, *given: Any) -> Any:
    terms = Terms(HANG_AFTER)
    return run_crew(ByName(_MODULE, function), *given, processes=1, terms=terms, preload=ranks.PRELOAD).value


def _lines(answer: dict[str, Any]) -> list[str]:
    """An answer as text: the file, and what is said of it indented."""
    lines = [answer["file"]]
    for name, value in answer.items():
        if name == "file":
            continue
        if isinstance(value, list):
            lines += ["  " + "  ".join(_shown(part) for part in entry.values()) for entry in value]
        else:
            lines.append(f"  {name}  {_shown(value)}")
    return lines


def _shown(value: Any) -> str:
    return f"{value:7.2%}" if isinstance(value, float) and 0 <= value <= 1 else str(value)
