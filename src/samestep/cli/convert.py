"""`samestep convert`: recipes and weights of PaddleViT, converted."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from samestep.checkpoint.files import replacing
from samestep.cli.options import JsonOption, argument, option, output_errors, require_new_file
from samestep.errors import EXIT_DONE, InputError

_SUFFIXES = {".yaml": ".yaml", ".yml": ".yaml", ".pdparams": ".safetensors"}


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    """Convert a recipe or weights of PaddleViT.

    A YAML file of ViT, DeiT or Swin becomes a recipe, with a line for every key; .pdparams weights
    of ViT become safetensors with timm's names. No code in a .pdparams file is executed.
    """

    example: ClassVar = (
        "samestep convert vit_base_patch16_224.yaml --devices-meant 8 --out mine.yaml"
    )

    file: Path = argument("FILE", "a .yaml or .pdparams file")
    out: Path = option("output file", "FILE", required=True)
    devices_meant: int | None = option(
        "for a YAML file: number of devices that DATA.BATCH_SIZE, a size per device, was chosen for",
        "N",
    )


def run(options: Options) -> int:
    """Write the converted file and print the conversion of each key or tensor."""
    file = options.file
    out = options.out
    suffix = _SUFFIXES.get(file.suffix)
    if suffix is None or out.suffix != suffix:
        expected = (
            "a .yaml file for a .yaml file of PaddleViT, a .safetensors file for a .pdparams file"
        )
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

        recipe = convert_recipe(file, options.devices_meant)
        content = recipe.to_text(file.name).encode()
        lines = [
            *map(str, recipe.keys),
            f"train with: {shlex.join(['samestep', 'train', str(out)])}",
        ]
        data = {"keys": list(map(str, recipe.keys))}
    problem = f"{out} cannot be written"
    with (
        output_errors(problem, "a writable folder", "--out in another folder"),
        replacing(out) as temporary,
    ):
        temporary.write_bytes(content)
    options.result({"out": str(out), **data}, *lines, f"{'written':<12}{out}")
    return EXIT_DONE
