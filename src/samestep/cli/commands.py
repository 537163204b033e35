"""Names of commands and recipes, and the text of `samestep --help`, without further imports."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# Modules that the fork server imports once for all ranks, in addition to the launcher's own list.
PRELOAD = ("samestep.recipes.run", "samestep.zoo.digits")

_HELP = """\
usage: samestep [-h] [--version] [--print-completion {bash,fish,tcsh,zsh}] COMMAND ...

Train PyTorch models on one or many devices with the same result.

example: samestep train digits --processes auto

options:
  -h, --help  print this text, or after COMMAND the options of the command
  --version   print the version
  --print-completion {bash,fish,tcsh,zsh}
              print the completion of a shell"""

SHELLS = ("bash", "fish", "tcsh", "zsh")
_SHIPPED = Path(__file__).parents[1] / "recipes" / "shipped"


class Command(NamedTuple):
    """A command of `samestep`.

    Its class in the module `samestep.cli.MODULE`, such as `Train`, declares the options and runs.
    """

    group: str
    module: str
    summary: str


COMMANDS = {
    "train": Command("train", "train", "train a recipe"),
    "resume": Command("train", "train", "resume a run"),
    "eval": Command("train", "models", "evaluate a checkpoint, or a file of weights"),
    "predict": Command("train", "models", "predict with a trained model"),
    "export": Command("train", "models", "write a trained model for other programs"),
    "convert": Command("train", "tools", "convert recipes and weights of PaddleViT"),
    "run": Command("train", "run", "run a script on several processes"),
    "submit": Command("train", "submit", "submit a job to Slurm"),
    "verify": Command("check", "experiments", "show that N processes compute the same as one"),
    "audit": Command(
        "check", "tools", "find mistakes of distributed training in any training command"
    ),
    "diff": Command("check", "experiments", "find the first difference of two runs"),
    "doctor": Command("check", "tools", "check this machine before training"),
    "bench": Command("speed", "experiments", "compare ways to run a recipe on this machine"),
    "profile": Command(
        "speed", "experiments", "measure the phases of a step, and find the slowest rank"
    ),
    "top": Command("look", "tools", "show the state of a run"),
    "report": Command("look", "tools", "write an HTML page about one or several runs"),
}
# Each invocation with valid input starts ranks.
STARTS_RANKS = ("train", "resume", "eval", "predict", "run", "verify", "bench", "profile")
# The command can be one of several processes of another launcher.
CAN_BE_RANK = ("train", "resume", "eval", "convert", "doctor", "top", "report")


def help_text() -> str:
    """Return the text of `samestep --help`."""
    lines = [_HELP]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", f"{group}:"]
        lines.append(f"  {name:<8}  {command.summary}")
    lines += ["", "recipes:"]
    lines += [f"  {name:<20}  {text}" for name, text in recipe_summaries().items()]
    return "\n".join(lines)


def recipe_summaries() -> dict[str, str]:
    """Return the shipped recipes and their first lines of text, without a command."""
    summaries = {}
    for path in sorted(_SHIPPED.glob("*.yaml")):
        # The first line is the schema for editors.
        comment = path.read_text(encoding="utf-8").splitlines()[1]
        text = comment.removeprefix("# ").partition(": samestep")[0]
        summaries[path.stem] = text.partition(". ")[0].rstrip(":")
    return summaries
