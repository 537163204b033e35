"""Names of the commands, and the parser of `samestep --help`, without the imports of any command."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple, TypeVar

# Modules that the fork server imports once for all ranks, in addition to the launcher's own list.
PRELOAD = ("samestep.recipes.run", "samestep.zoo.digits")

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


class Command(NamedTuple):
    """A command of `samestep`; the function `add_NAME` of its module receives a function that creates its parser."""

    module: str  # in samestep.cli
    summary: str
    starts_ranks: bool = False  # each invocation with valid input starts ranks


COMMANDS = {
    "train": Command("train", "train a recipe", starts_ranks=True),
    "resume": Command("train", "resume a run", starts_ranks=True),
    "eval": Command("models", "evaluate a checkpoint, or a file of weights", starts_ranks=True),
    "predict": Command("models", "predict with a trained model", starts_ranks=True),
    "export": Command("models", "write a trained model for other programs"),
    "push": Command("models", "upload a trained model to the Hugging Face Hub"),
    "convert": Command("models", "convert recipes and weights of PaddleViT"),
    "run": Command("train", "run a script on several processes", starts_ranks=True),
    "submit": Command("submit", "submit a job to Slurm, Ray, Kubernetes, SkyPilot or dstack"),
    "top": Command("runs", "show the state of a run"),
    "report": Command("runs", "write an HTML page about one or several runs"),
    "diff": Command("replay", "find the first difference of two runs"),
    "replay": Command("replay", "compute a step of a run again"),
    "verify": Command("verify", "show that N processes compute the same as one", starts_ranks=True),
    "audit": Command("audit", "find mistakes of distributed training in any training command"),
    "bench": Command("measure", "compare ways to run a recipe on this machine", starts_ranks=True),
    "profile": Command("measure", "measure the phases of a step, and possible savings", starts_ranks=True),
    "tune": Command("measure", "find the number of loader processes for a recipe on this machine", starts_ranks=True),
    "plan": Command("plan", "predict step time and memory on other numbers of devices"),
    "pack": Command("pack", "write samples to sharded files, or the index of such files"),
    "cache": Command("cache", "list or remove the caches of images and of streams"),
    "doctor": Command("doctor", "check this machine before training"),
}


class _VersionAction(argparse.Action):
    """Prints the version; only then is it read from the installed package, which takes 20 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: Any) -> None:
        from importlib.metadata import version

        print(f"samestep {version('samestep')}")
        parser.exit()


def build_root(kind: type[Parser]) -> tuple[Parser, Any]:
    """Return the parser without commands, and the action to which commands are added."""
    parser = kind(
        prog="samestep",
        description="Train PyTorch models on one or many devices with the same result.",
        epilog="example: samestep train digits --processes auto",
    )
    parser.add_argument("--version", action=_VersionAction, nargs=0, help="print the version and exit")
    text = "given by torch.distributed.launch; the environment variable LOCAL_RANK has the same value"
    parser.add_argument("--local-rank", "--local_rank", type=int, metavar="N", help=text)
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    return parser, commands


def print_help() -> None:
    """Print the text of `samestep --help`."""
    parser, commands = build_root(argparse.ArgumentParser)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary)
    parser.print_help()
