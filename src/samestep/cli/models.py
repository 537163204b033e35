"""`samestep eval`, `predict`, `export` and `convert`: evaluation, use and conversion of models."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.checkpoint.files import replacing
from samestep.cli.external_launcher import reported_by_rank_0, require_single_process, run_as_rank
from samestep.cli.launch_options import LaunchOptions, call_in_worker, launch_ranks
from samestep.cli.options import (
    add_machine_options,
    add_number,
    add_options,
    add_run_argument,
    option_conflict,
    output_errors,
    print_json,
    require_file,
    require_new_file,
    run_options,
)
from samestep.cli.recipe_options import add_strategy_options, all_overrides, with_microbatches
from samestep.cli.run_plans import RunPlan, plan_from_checkpoint, reading, refuse_script_run
from samestep.config import RunOptions
from samestep.errors import EXIT_DONE, InputError, RunError
from samestep.launcher.launch import LaunchConfig
from samestep.launcher.watchdog import HANG_AFTER
from samestep.loggers.logger import format_metric
from samestep.recipes.recipe_files import load_recipe, make_recipe, read_dataset_info, recipe_data

_EXPORT_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}
_CONVERTED_SUFFIXES = {".yaml": ".yaml", ".yml": ".yaml", ".pdparams": ".safetensors"}


def add_eval(add_parser: Any) -> None:
    """Add `samestep eval`."""
    parser = add_parser(
        description="Evaluate a checkpoint of a run, or a file of weights with a recipe. Every sample counts once, on "
        "any number of processes.",
        epilog="example: samestep eval runs/first --checkpoint best",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="directory of the run; with --pretrained, a recipe")
    parser.add_argument("--checkpoint", metavar="WHICH", help="best, last, epoch-N, or a step (default best)")
    add_options(parser, "--set", "--trust")
    text = "evaluate these weights (.safetensors, .pth, .pdparams) with the recipe given as RUN"
    parser.add_argument("--pretrained", metavar="FILE", help=text)
    text = "write precision, recall and F1 per class: classes.json and confusion.png in DIR"
    parser.add_argument("--report", type=Path, metavar="DIR", help=text)
    add_machine_options(parser)
    add_strategy_options(parser)
    add_options(parser, "--json")
    parser.set_defaults(run=_evaluate)


def add_predict(add_parser: Any) -> None:
    """Add `samestep predict`."""
    parser = add_parser(
        description="Predict with the model of a run for files (images or texts, depending on the recipe), or complete "
        "a prompt with a language model. The training data is not needed.",
        epilog="example: samestep predict runs/first picture.png",
    )
    add_run_argument(parser, checkpoint="best")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="input files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for predicted masks, for segmentation")
    parser.add_argument("--prompt", metavar="TEXT", help="text to complete, for language models")
    add_number(parser, "--tokens", default=100, metavar="N", help="tokens to generate (default 100)")
    add_options(parser, "--device", "--json")
    parser.set_defaults(run=_predict)


def add_export(add_parser: Any) -> None:
    """Add `samestep export`."""
    parser = add_parser(
        description="Write the model of a run as weights (safetensors), as a torch.export program, or as ONNX, "
        "and compare outputs of the file with the model.",
        epilog="example: samestep export runs/first --format onnx --like picture.png",
    )
    add_run_argument(parser, checkpoint="best")
    formats = tuple(_EXPORT_SUFFIXES)
    parser.add_argument("--format", choices=formats, default="safetensors", help="default safetensors")
    parser.add_argument("--like", type=Path, metavar="FILE", help="example input; required except for safetensors")
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file (default: in the directory of the run)")
    add_options(parser, "--json")
    parser.set_defaults(run=_export)


def add_push(add_parser: Any) -> None:
    """Add `samestep push`."""
    parser = add_parser(
        description="Upload the weights of a checkpoint with recipe, model card and, by choice, a certificate of "
        "samestep verify to a repository of the Hugging Face Hub. The Hub's client reads the token: hf auth login.",
        epilog="example: samestep push runs/first me/digits --certificate certificate/certificate.json",
    )
    add_run_argument(parser, checkpoint="best")
    parser.add_argument("repository", nargs="?", metavar="USER/NAME", help="repository; created if it does not exist")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="certificate.json of samestep verify")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the files into a new folder, without an upload")
    add_options(parser, "--json")
    parser.set_defaults(run=_push)


def add_convert(add_parser: Any) -> None:
    """Add `samestep convert`."""
    parser = add_parser(
        description="Convert a YAML file of PaddleViT's ViT to a recipe, with a line for every key, or .pdparams "
        "weights to safetensors with timm's names. A .pdparams file is a pickle; no code in the file is executed.",
        epilog="example: samestep convert vit_base_patch16_224.yaml --devices-meant 8 --out mine.yaml",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a .yaml or .pdparams file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="output file")
    text = "for a YAML file: number of devices that DATA.BATCH_SIZE, a size per device, was chosen for"
    parser.add_argument("--devices-meant", type=int, metavar="N", help=text)
    add_options(parser, "--json")
    parser.set_defaults(run=_convert)


def _push(arguments: argparse.Namespace) -> int:
    """Write the files, upload them, and print the address or the folder."""
    from samestep.tools.push import upload, write_repository

    require_single_process("push")
    refuse_script_run(arguments.folder)
    name, out = arguments.repository, arguments.out
    if (name is None) == (out is None):
        value = "push with neither a repository nor --out" if name is None else f"{name} with --out {out}"
        raise option_conflict(value, "a repository, or --out for the files alone", "samestep push RUN USER/NAME")
    if arguments.private and out is not None:
        raise option_conflict(f"--private with --out {out}", "--private for an upload", "leave --private out")
    with TemporaryDirectory() as folder:
        repository = write_repository(arguments.folder, arguments.checkpoint, arguments.certificate, Path(folder))
        address = None if name is None else upload(Path(folder), repository, name, private=arguments.private)
        if out is not None:
            with output_errors(f"--out {out}", "a new folder", "--out with another folder"):
                shutil.copytree(folder, out)
    result = {**asdict(repository), "address": address or str(out)}
    if arguments.json:
        print_json(result)
    else:
        print(f"{'uploaded' if out is None else 'written':<12}{result['address']}\nsha256      {repository.sha256}")
    return EXIT_DONE


def _evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate and print `loss`, `samples` and the metrics."""
    with reported_by_rank_0():
        overrides = all_overrides(arguments)
        launch, options = LaunchOptions.parse(arguments), run_options(arguments)
    file = arguments.pretrained

    def rank_arguments(plan: RunPlan) -> tuple[Any, ...]:
        if arguments.report is not None:
            with output_errors(f"--report {arguments.report}", "a writable folder", "--report with another folder"):
                arguments.report.mkdir(parents=True, exist_ok=True)
        is_other_data = file is None and bool(arguments.overrides)
        classes = read_dataset_info(arguments.folder).classes if is_other_data else None
        return plan.recipe, options, plan.checkpoint, arguments.report, classes

    def make_plan(restarts: int = 0) -> RunPlan:
        plan, is_rank = _plan(arguments, overrides), launch.rendezvous is not None
        recipe, _ = with_microbatches(plan.recipe, is_rank=is_rank)
        return replace(plan, recipe=recipe)

    if launch.rendezvous is not None:
        plan, values = run_as_rank(launch, launch.rendezvous, "evaluate", make_plan, rank_arguments)
        if launch.rendezvous.rank != 0:
            return EXIT_DONE
    else:
        plan = make_plan()
        processes = launch.process_range(plan.recipe)[1]
        with reading(plan.checkpoint):
            values = launch_ranks(
                "evaluate",
                *rank_arguments(plan),
                processes=processes,
                launch_config=LaunchConfig(HANG_AFTER),
                options=launch,
            ).value
    by_class = values.pop("by_class", None)
    result = {"checkpoint": str(plan.checkpoint), "step": plan.step, **values}
    report: list[str] = []
    if by_class is not None and arguments.report is not None:
        report = _write_class_report(arguments.report, by_class, result)
    if arguments.json:
        print_json(result)
        return EXIT_DONE
    width = max(12, *(len(name) + 2 for name in values))
    lines = [f"{'checkpoint':<{width}}{plan.checkpoint}"]
    lines += [f"{name:<{width}}{format_metric(name, value)}" for name, value in values.items()]
    print("\n".join(lines + report))
    return EXIT_DONE


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> RunPlan:
    """Return the plan of an evaluation with these overrides, after a check of all options."""
    folder, which, file = arguments.folder, arguments.checkpoint, arguments.pretrained
    if arguments.report is not None:
        from samestep.metrics.class_report import require_matplotlib

        require_matplotlib("confusion matrix")
    if file is None:
        for override in arguments.overrides:
            if not override.startswith("data."):
                raise option_conflict(
                    f"--set {override} with a run",
                    "the recipe of the run, apart from the data",
                    "leave --set out, or evaluate the weights with a recipe: samestep eval RECIPE --set ... "
                    "--pretrained FILE",
                )
        # The evaluating machine can differ from the training machine: the strategy of the run does not apply.
        layout = ["strategy={}", *(text for text in overrides if text not in arguments.overrides)]
        plan = plan_from_checkpoint(folder, which or "best", layout, trust=arguments.trust)
        recipe = make_recipe(recipe_data(plan.recipe), arguments.overrides, origin=str(folder))
        return replace(plan, recipe=recipe)
    if which is not None:
        value = f"--checkpoint {which} with --pretrained {file}"
        raise option_conflict(value, "weights from a checkpoint or from a file")
    recipe = load_recipe(str(folder), overrides)
    # Without a run, the file replaces the folder. A file is not a directory, so no logs are written.
    return RunPlan(replace(recipe, model=replace(recipe.model, pretrained=None)), Path(file), Path(file))


def _write_class_report(folder: Path, by_class: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Write the result of an evaluation with its numbers per class; return their lines for the terminal."""
    # Imported here: the other commands do not need numpy.
    from samestep.metrics.class_report import averages, class_rows, draw_confusion, table_lines

    names, counts = by_class["classes"], by_class["counts"]
    rows = class_rows(counts, names)
    data = {**result, **averages(rows), "classes": [asdict(row) for row in rows], "confusion": counts}
    table, picture = folder / "classes.json", folder / "confusion.png"
    try:
        table.write_text(json.dumps(data) + "\n", encoding="utf-8")
        draw_confusion(counts, names, picture)
    except OSError as error:
        raise RunError(
            f"--report {folder} cannot be written: {error.strerror}",
            fix="free disk space, or --report with another folder",
            code="E_OUTPUT",
        ) from error
    files = [str(table), str(picture), *([str(folder / "overlays")] if by_class.get("pictures") else [])]
    return ["", *table_lines(rows), "", f"{'report':<12}{', '.join(files)}"]


def _predict(arguments: argparse.Namespace) -> int:
    """Print one prediction per file, or the completed text."""
    require_single_process("predict")
    prompt: str | None = arguments.prompt
    if (prompt is None) == (not arguments.files):
        raise option_conflict(
            f"predict with {'neither files nor' if prompt is None else 'both files and'} a prompt",
            "input files, or --prompt for a language model",
            "samestep predict RUN FILE, or samestep predict RUN --prompt TEXT",
        )
    for file in arguments.files:
        require_file(file)
    plan = plan_from_checkpoint(arguments.folder, arguments.checkpoint, [], trust=arguments.trust)
    options = RunOptions(device=arguments.device, quiet=True)
    model = (plan.recipe, options, read_dataset_info(arguments.folder), plan.checkpoint)
    if prompt is not None:
        with reading(plan.checkpoint):
            completion = call_in_worker("samestep.recipes.run", "complete", *model, prompt, arguments.tokens)
        print_json(completion) if arguments.json else print(completion["text"])
        return EXIT_DONE
    files = tuple(arguments.files)
    with reading(plan.checkpoint):
        predictions = call_in_worker("samestep.recipes.run", "predict", *model, files, arguments.out)
    for prediction in predictions:
        print_json(prediction) if arguments.json else print("\n".join(_prediction_lines(prediction)))
    return EXIT_DONE


def _prediction_lines(prediction: dict[str, Any]) -> list[str]:
    """Return a prediction as text: the file, followed by indented values."""
    lines = [prediction["file"]]
    for name, value in prediction.items():
        if isinstance(value, list):
            lines += ["  " + "  ".join(map(_format, entry.values())) for entry in value]
        elif name != "file":
            lines.append(f"  {name}  {_format(value)}")
    return lines


def _format(value: Any) -> str:
    return f"{value:7.2%}" if isinstance(value, float) and 0 <= value <= 1 else str(value)


def _export(arguments: argparse.Namespace) -> int:
    """Export the model and print the largest difference of the outputs."""
    require_single_process("export")
    folder: Path = arguments.folder
    plan = plan_from_checkpoint(folder, arguments.checkpoint, [], trust=arguments.trust)
    out = arguments.out or folder / f"model-{plan.step}{_EXPORT_SUFFIXES[arguments.format]}"
    kinds = {suffix: kind for kind, suffix in _EXPORT_SUFFIXES.items()}
    if (kind := kinds.get(out.suffix, arguments.format)) != arguments.format:
        expected = f"a {_EXPORT_SUFFIXES[arguments.format]} file"
        raise option_conflict(f"--out {out} with --format {arguments.format}", expected, f"--format {kind}")
    require_new_file(out)
    if arguments.like is not None:
        require_file(arguments.like, "--like")
    model = (plan.recipe, read_dataset_info(folder), plan.checkpoint)
    try:
        with reading(plan.checkpoint):
            exported = call_in_worker("samestep.tools.export", "export", *model, arguments.format, out, arguments.like)
    except BaseException:
        out.unlink(missing_ok=True)  # an incomplete file; there was none before
        raise
    if arguments.json:
        print_json(asdict(exported))
        return EXIT_DONE
    print(f"{'written':<12}{exported.path}")
    if exported.difference is not None:
        print(f"{'agrees':<12}within {exported.difference:.1e} of the largest output")
    return EXIT_DONE


def _convert(arguments: argparse.Namespace) -> int:
    """Write the converted file and print the conversion of each key or tensor."""
    file, out, devices = arguments.file, arguments.out, arguments.devices_meant
    _require_convertible(file, out, devices)
    # Imported here: the other commands do not need these modules.
    if file.suffix == ".pdparams":
        from safetensors.torch import save

        from samestep.zoo.paddle import read_pdparams

        weights = read_pdparams(file)
        content = save(weights.tensors)
        lines = [f"{source} -> {name}" for name, source in weights.sources.items()]
        lines += [f"{name}: left out, not part of the model" for name in weights.left_out]
        data: dict[str, Any] = {"names": weights.sources, "left_out": list(weights.left_out)}
        note = f", {len(weights.tensors)} tensors"
    else:
        from samestep.tools.convert import convert_recipe

        recipe = convert_recipe(file, devices)
        content = recipe.to_text(file.name).encode()
        lines = [str(key) for key in recipe.keys]
        data, note = {"keys": lines}, f"; train with: {shlex.join(['samestep', 'train', str(out)])}"
    problem = f"{out} cannot be written"
    with output_errors(problem, "a writable folder", "--out in another folder"), replacing(out) as temporary:
        temporary.write_bytes(content)
    if arguments.json:
        print_json({"out": str(out), **data})
    else:
        print("\n".join([*lines, f"{'written':<12}{out}{note}"]))
    return EXIT_DONE


def _require_convertible(file: Path, out: Path, devices: int | None) -> None:
    suffix = _CONVERTED_SUFFIXES.get(file.suffix)
    if suffix is None:
        raise InputError(f"{file} is not a file of PaddleViT", "a .yaml or .pdparams file", "check the path")
    if out.suffix != suffix:
        raise InputError(f"--out {out}", f"a {suffix} file for a {file.suffix} file", f"--out X{suffix}")
    require_new_file(out)
    if devices is not None and (devices < 1 or file.suffix == ".pdparams"):
        value, expected = f"--devices-meant {devices} for {file}", "at least 1, for a YAML file"
        raise InputError(value, expected, "--devices-meant 8", code="E_VALUE")
