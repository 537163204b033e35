"""`samestep convert`: recipes and weights of PaddleViT, converted."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import replacing
from samestep.cli.options import add_number, add_options, output_errors, print_json, require_new_file
from samestep.errors import EXIT_DONE, InputError

_SUFFIXES = {".yaml": ".yaml", ".yml": ".yaml", ".pdparams": ".safetensors"}


def add_convert(add_parser: Any) -> None:
    """Add `samestep convert`."""
    parser = add_parser(
        description="Convert a YAML file of PaddleViT's ViT, DeiT or Swin to a recipe, with a line for every key, or "
        ".pdparams weights of ViT to safetensors with timm's names. No code in a .pdparams file is executed.",
        epilog="example: samestep convert vit_base_patch16_224.yaml --devices-meant 8 --out mine.yaml",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a .yaml or .pdparams file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="output file")
    text = "for a YAML file: number of devices that DATA.BATCH_SIZE, a size per device, was chosen for"
    add_number(parser, "--devices-meant", metavar="N", help=text)
    add_options(parser, "--json")
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    """Write the converted file and print the conversion of each key or tensor."""
    file, out = arguments.file, arguments.out
    suffix = _SUFFIXES.get(file.suffix)
    if suffix is None or out.suffix != suffix:
        expected = "a .yaml file for a .yaml file of PaddleViT, a .safetensors file for a .pdparams file"
        raise InputError(f"{file} and --out {out}", expected, "check the paths")
    require_new_file(out)
    # Imported here: the other commands do not need these modules.
    if file.suffix == ".pdparams":
        from safetensors.torch import save

        from samestep.zoo.paddle import read_pdparams

        weights = read_pdparams(file)
        content = save(weights.tensors)
        lines = [f"{source} -> {name}" for name, source in weights.sources.items()]
        lines += [f"{name}: left out, not part of the model" for name in weights.left_out]
        data: dict[str, Any] = {"names": weights.sources, "left_out": list(weights.left_out)}
    else:
        from samestep.tools.convert import convert_recipe

        recipe = convert_recipe(file, arguments.devices_meant)
        content = recipe.to_text(file.name).encode()
        lines = [*map(str, recipe.keys), f"train with: {shlex.join(['samestep', 'train', str(out)])}"]
        data = {"keys": list(map(str, recipe.keys))}
    problem = f"{out} cannot be written"
    with output_errors(problem, "a writable folder", "--out in another folder"), replacing(out) as temporary:
        temporary.write_bytes(content)
    if arguments.json:
        print_json({"out": str(out), **data})
    else:
        print("\n".join([*lines, f"{'written':<12}{out}"]))
    return EXIT_DONE
