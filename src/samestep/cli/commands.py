"""Names of the commands, and the parser of `samestep --help`, without the imports of any command."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple, TypeVar

# Modules that the fork server imports once for all ranks, in addition to the launcher's own list.
PRELOAD = ("samestep.recipes.run", "samestep.zoo.digits")

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


class Command(NamedTuple):
    """A command of `samestep`.

    The function `add_NAME` of the module `samestep.cli.NAME` receives a function that creates its parser.
    """

    summary: str
    starts_ranks: bool = False  # each invocation with valid input starts ranks


COMMANDS = {
    "train": Command("train a recipe", starts_ranks=True),
    "resume": Command("resume a run", starts_ranks=True),
    "eval": Command("evaluate a checkpoint, or a file of weights", starts_ranks=True),
    "predict": Command("predict with a trained model", starts_ranks=True),
    "export": Command("write a trained model for other programs"),
    "push": Command("upload a trained model to the Hugging Face Hub"),
    "convert": Command("convert recipes and weights of PaddleViT"),
    "run": Command("run a script on several processes", starts_ranks=True),
    "submit": Command("submit a job to Slurm or Kubernetes"),
    "top": Command("show the state of a run"),
    "report": Command("write an HTML page about one or several runs"),
    "diff": Command("find the first difference of two runs"),
    "replay": Command("compute a step of a run again"),
    "verify": Command("show that N processes compute the same as one", starts_ranks=True),
    "audit": Command("find mistakes of distributed training in any training command"),
    "bench": Command("compare ways to run a recipe on this machine", starts_ranks=True),
    "profile": Command("measure the phases of a step, and possible savings", starts_ranks=True),
    "tune": Command("find the number of loader processes for a recipe on this machine", starts_ranks=True),
    "plan": Command("predict step time and memory on other numbers of devices"),
    "cache": Command("list or remove the caches of images and of streams"),
    "doctor": Command("check this machine before training"),
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
