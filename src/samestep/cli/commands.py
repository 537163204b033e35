"""Names of the commands, and the text of `samestep --help`, without the imports of any command."""

from __future__ import annotations

from typing import NamedTuple

# Modules that the fork server imports once for all ranks, in addition to the launcher's own list.
PRELOAD = ("samestep.recipes.run", "samestep.zoo.digits")

_HELP = """\
usage: samestep [-h] [--version] COMMAND ...

Train PyTorch models on one or many devices with the same result.

example: samestep train digits --processes auto

options:
  -h, --help  print this text, or after COMMAND the options of the command
  --version   print the version"""


class Command(NamedTuple):
    """A command of `samestep`.

    Its class in the module `samestep.cli.MODULE`, such as `Train`, declares the options and runs.
    """

    group: str
    module: str
    summary: str
    starts_ranks: bool = False  # each invocation with valid input starts ranks
    can_be_rank: bool = False  # the command can be one of several processes of another launcher


COMMANDS = {
    "train": Command("train", "train", "train a recipe", starts_ranks=True, can_be_rank=True),
    "resume": Command("train", "train", "resume a run", starts_ranks=True, can_be_rank=True),
    "eval": Command(
        *("train", "models", "evaluate a checkpoint, or a file of weights"),
        starts_ranks=True,
        can_be_rank=True,
    ),
    "predict": Command("train", "models", "predict with a trained model", starts_ranks=True),
    "export": Command(
        "train", "models", "write a trained model for other programs, or to the Hugging Face Hub"
    ),
    "convert": Command(
        "train", "tools", "convert recipes and weights of PaddleViT", can_be_rank=True
    ),
    "run": Command("train", "run", "run a script on several processes", starts_ranks=True),
    "submit": Command("train", "run", "submit a job to Slurm or Kubernetes"),
    "verify": Command(
        "check", "experiments", "show that N processes compute the same as one", starts_ranks=True
    ),
    "audit": Command(
        "check", "tools", "find mistakes of distributed training in any training command"
    ),
    "diff": Command(
        "check", "experiments", "find the first difference of two runs, or compute a step again"
    ),
    "doctor": Command("check", "tools", "check this machine before training", can_be_rank=True),
    "bench": Command(
        "speed", "experiments", "compare ways to run a recipe on this machine", starts_ranks=True
    ),
    "profile": Command(
        *("speed", "experiments", "measure the phases of a step, and find the slowest rank"),
        starts_ranks=True,
    ),
    "top": Command("look", "tools", "show the state of a run", can_be_rank=True),
    "report": Command(
        "look", "tools", "write an HTML page about one or several runs", can_be_rank=True
    ),
}


def help_text() -> str:
    """Return the text of `samestep --help`."""
    lines = [_HELP]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", f"{group}:"]
        lines.append(f"  {name:<8}  {command.summary}")
    return "\n".join(lines)
