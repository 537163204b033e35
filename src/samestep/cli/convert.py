"""`samestep convert`: recipes and weights of PaddleViT."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli import options
from samestep.errors import EXIT_DONE, InputError

_ENDINGS = {".yaml": ".yaml", ".yml": ".yaml", ".pdparams": ".safetensors"}


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "convert",
        help="convert recipes and weights of PaddleViT",
        description="Convert a YAML file of PaddleViT's ViT to a recipe, with an account of every key, or its "
        ".pdparams weights to safetensors with timm's names. A .pdparams file is a pickle; nothing in it is run.",
        epilog="example: samestep convert vit_base_patch16_224.yaml --devices-meant 8 --out mine.yaml",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a .yaml or .pdparams file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument(
        "--devices-meant",
        type=int,
        metavar="N",
        help="of a YAML file: how many devices its DATA.BATCH_SIZE is meant for; batch_size is that of all together",
    )
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the other form of the file, and say what became of it."""
    _require_files(arguments)
    if arguments.file.suffix == ".pdparams":
        return _weights(arguments)
    return _recipe(arguments)


def _recipe(arguments: argparse.Namespace) -> int:
    from samestep.tools.convert.recipe import convert_recipe

    converted = convert_recipe(arguments.file, arguments.devices_meant)
    arguments.out.write_text(converted.to_text(arguments.file.name), encoding="utf-8")
    lines = [str(account) for account in converted.accounts]
    if arguments.json:
        options.print_json({"out": str(arguments.out), "keys": lines})
        return EXIT_DONE
    print("\n".join([*lines, f"{'written':<12}{arguments.out}; train it with: samestep train {arguments.out}"]))
    return EXIT_DONE


def _weights(arguments: argparse.Namespace) -> int:
    from samestep.tools.convert.weights import convert_weights

    converted = convert_weights(arguments.file, arguments.out)
    if arguments.json:
        left_out = list(converted.left_out)
        options.print_json({"out": str(arguments.out), "names": converted.sources, "left_out": left_out})
        return EXIT_DONE
    lines = [f"{source} -> {name}" for name, source in converted.sources.items()]
    lines += [f"{name}: left out, it is not of the model" for name in converted.left_out]
    print("\n".join([*lines, f"{'written':<12}{arguments.out}, {len(converted.tensors)} tensors"]))
    return EXIT_DONE


def _require_files(arguments: argparse.Namespace) -> None:
    file, out, count = arguments.file, arguments.out, arguments.devices_meant
    if file.suffix not in _ENDINGS:
        raise InputError(f"{file} is no file of PaddleViT's", rule="a .yaml or .pdparams file", do="look at the path")
    if out.suffix != _ENDINGS[file.suffix]:
        raise InputError(
            f"--out {out}", rule=f"{file.suffix} becomes {_ENDINGS[file.suffix]}", do=f"--out X{_ENDINGS[file.suffix]}"
        )
    if out.exists():
        raise InputError(f"{out} exists", rule="nothing is written over", do="--out another, or remove it")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}", rule="--out is in a folder that is there", do="make it")
    if count is not None and (count < 1 or file.suffix == ".pdparams"):
        raise InputError(
            f"--devices-meant {count} for {file}", rule="at least 1, for a YAML file", do="--devices-meant 8"
        )
