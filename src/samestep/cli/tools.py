"""`samestep doctor`, `audit`, `top`, `report` and `convert`: commands that train no recipe.

The tools are imported by the commands that use them, so that the other commands stay fast.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from samestep.checkpoint.durable_files import replacing
from samestep.cli.commands import PRELOAD
from samestep.cli.options import (
    JsonOption,
    WorkersOption,
    argument,
    option,
    output_errors,
    parse_process_count,
    require_new_file,
)
from samestep.config import default_workers
from samestep.distributed.devices import default_processes
from samestep.distributed.logging import plain_console
from samestep.distributed.resources import usable_processors
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError, RunError
from samestep.runs import not_a_run, run_folder

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from samestep.tools.doctor import Finding

_REPORT = "report.html"
_TOP_SECONDS = 1.0  # between updates
_CONVERTED_SUFFIXES = {".yaml": ".yaml", ".yml": ".yaml", ".pdparams": ".safetensors"}


@dataclass(frozen=True, kw_only=True)
class Doctor(JsonOption, WorkersOption):
    """Check packages, GPUs, memory, limits, launcher and runs folder, and run a short self-test.

    Each finding is pass, info, warn or fail; warn and fail include a fix. Nothing is changed. Exit
    codes: 0 no failure, 2 invalid input, 3 at least one failure.
    """

    example: ClassVar = "samestep doctor --processes 8 --workers 4"

    processes: str = option(
        "ranks on this machine (default: one per GPU, else per core, at most 8)",
        "N",
        default="auto",
    )
    runs: Path = option("folder of runs", "DIR", default=Path("runs"))
    quick: bool = option("skip the self-test; torch is not imported", default=False)

    def run(self) -> int:
        """Check and print; return 0 without failures and 3 otherwise."""
        from samestep.tools.doctor import Plan, Verdict, check_machine, read_nvidia

        nvidia = read_nvidia()
        processes = default_processes(len(nvidia.gpus))
        if self.processes != "auto":
            processes = parse_process_count(self.processes)
        workers = self.workers
        if workers is None:
            workers = default_workers(usable_processors(), processes)
        plan = Plan(processes, workers)
        findings = list(check_machine(plan, nvidia, self.runs, quick=self.quick, preload=PRELOAD))
        verdicts = get_args(Verdict)  # the worst one is the last
        verdict = max((finding.verdict for finding in findings), key=verdicts.index)
        counts = Counter(finding.verdict for finding in findings)
        total = ", ".join(f"{counts[name]} {name}" for name in verdicts)
        data = {
            "verdict": verdict,
            "plan": str(plan),
            "findings": [asdict(finding) for finding in findings],
        }
        self.result(data, *_lines(findings), total)
        if verdict == "fail":
            return EXIT_DIFFERS
        return EXIT_DONE


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.verdict}  {finding.name:<24} {finding.value}"
        if finding.expected is not None:
            yield f"      {'expected':<24} {finding.expected}"
            yield f"      {'fix':<24} {finding.fix}"


@dataclass(frozen=True, kw_only=True)
class Audit(JsonOption):
    """Run a training command, observe its processes, and report mistakes of distributed training.

    The command is one such as torchrun, accelerate launch or python. A finding has evidence and the
    line of the script, which does not use Samestep and is not changed. Exit codes: 0 no finding, 1
    nothing was observed, 2 invalid input, 3 findings; if the command fails, its own.
    """

    example: ClassVar = "samestep audit -- torchrun --nproc-per-node 2 train.py"
    usage: ClassVar = "samestep audit [-h] [--json] -- COMMAND ..."

    script_arguments: Sequence[str] = ()

    def run(self) -> int:
        """Run, analyse and print; return 3 with findings, or the exit code of a failed command."""
        from samestep.tools.audit.audit import analyse, print_report, run_observed

        command = list(self.script_arguments)
        if not command:
            value = "samestep audit without a command"
            fix = "samestep audit -- torchrun --nproc-per-node 2 train.py"
            raise InputError(value, "a command after --", fix, code="E_MISSING_KEY")
        with tempfile.TemporaryDirectory(prefix="samestep-audit-") as name:
            folder = Path(name)
            code = run_observed(command, folder, quiet=self.json)
            analysis = analyse(folder)
        # A command that failed can have ended before the first observation.
        if not analysis.worlds and code == EXIT_DONE:
            expected = (
                "a Python command that trains with PyTorch: a DataLoader or an optimizer of torch"
            )
            fix = f"start the command with the Python of Samestep, {sys.executable}, without -S"
            raise RunError("nothing was observed", expected, fix, code="E_NOTHING_OBSERVED")
        if self.json:
            self.result({**asdict(analysis), "exit_code": code})
        else:
            print_report(analysis)
        # Findings of a failed command are printed, but its own exit code says more.
        if code != EXIT_DONE:
            print(f"the command failed with exit code {code}", file=sys.stderr)
            return code
        if analysis.findings:
            return EXIT_DIFFERS
        return EXIT_DONE


@dataclass(frozen=True, kw_only=True)
class Top(JsonOption):
    """Show the state of each rank of a run, before, during and after the run.

    The state is read from the run's directory. Ctrl-C ends the view. Without a terminal, the state
    is printed once.
    """

    example: ClassVar = "samestep top runs/first --once"

    folder: Path = argument("RUN", "name or directory of the run", type=run_folder)
    once: bool = option("print the state once and exit", default=False)

    def run(self) -> int:
        """Show the run once, or until Ctrl-C."""
        from samestep.tools.top import read_status, render

        console = plain_console()
        is_view = console.is_terminal and not console.is_dumb_terminal  # dumb: no cursor to move
        if is_view and not (self.json or self.once):
            self._follow(console)
            return EXIT_DONE
        status = read_status(self.folder)
        if status is None:
            raise not_a_run(self.folder)
        if self.json:
            self.result({"run": str(self.folder), **asdict(status)})
        else:
            console.print(render(self.folder, status))
        return EXIT_DONE

    def _follow(self, console: Console) -> None:
        from rich.live import Live
        from rich.text import Text

        from samestep.tools.top import read_status, render

        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            try:
                while True:
                    status = read_status(self.folder)
                    view: RenderableType = Text(f"waiting for {self.folder}")
                    if status is not None:
                        view = render(self.folder, status)
                    live.update(view, refresh=True)
                    time.sleep(_TOP_SECONDS)
            except KeyboardInterrupt:
                return


@dataclass(frozen=True, kw_only=True)
class Report(JsonOption):
    """Write one HTML file about one or several runs.

    The page has curves, samples per second, events and recipes, and needs no other file and no
    network. Runs can be unfinished.
    """

    example: ClassVar = "samestep report runs/first runs/second --out both.html"

    folders: Sequence[Path] = argument(
        "RUN", "name or directory of a run", nargs="+", type=run_folder
    )
    out: Path | None = option(
        f"output file (default {_REPORT} in the directory of a single run, otherwise in the "
        "current one)",
        "FILE",
    )

    def run(self) -> int:
        """Write the page and print its path."""
        from samestep.tools.report import MARK, report_page, summary
        from samestep.tools.run_log import read_runs

        runs = read_runs(self.folders)
        out = self.out or Path(_REPORT)
        if self.out is None and len(runs) == 1:
            out = self.folders[0] / _REPORT
        text = report_page(runs)
        value = f"{out} cannot be written"
        with output_errors(value, "a file in a writable folder", "--out with another path"):
            if out.exists():  # only an earlier page is overwritten
                # By its first bytes: `--out train.py` must not destroy a script.
                with out.open("rb") as file:
                    is_earlier = file.read(len(MARK)) == MARK.encode()
                if not is_earlier:
                    value = f"{out} is not a report"
                    expected = "a new file, or an earlier report"
                    fix = "--out with another name"
                    raise InputError(value, expected, fix, code="E_OUTPUT")
            with replacing(out) as temporary:
                temporary.write_text(text, encoding="utf-8")
        data = {"report": str(out), "bytes": out.stat().st_size, "runs": list(map(summary, runs))}
        self.result(data, f"{'report':<12}{out}")
        return EXIT_DONE


@dataclass(frozen=True, kw_only=True)
class Convert(JsonOption):
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
        "for a YAML file: number of devices that DATA.BATCH_SIZE, a size per device, was chosen "
        "for",
        "N",
    )

    def run(self) -> int:
        """Write the converted file and print the conversion of each key or tensor."""
        file = self.file
        out = self.out
        suffix = _CONVERTED_SUFFIXES.get(file.suffix)
        if suffix is None or out.suffix != suffix:
            expected = (
                "a .yaml file for a .yaml file of PaddleViT, a .safetensors file for a .pdparams "
                "file"
            )
            raise InputError(f"{file} and --out {out}", expected, "check the paths")
        require_new_file(out)
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

            recipe = convert_recipe(file, self.devices_meant)
            content = recipe.to_text(file.name).encode()
            keys = [str(key) for key in recipe.keys]
            train = shlex.join(["samestep", "train", str(out)])
            lines = [*keys, f"train with: {train}"]
            data = {"keys": keys}
        value = f"{out} cannot be written"
        with (
            output_errors(value, "a writable folder", "--out in another folder"),
            replacing(out) as temporary,
        ):
            temporary.write_bytes(content)
        self.result({"out": str(out), **data}, *lines, f"{'written':<12}{out}")
        return EXIT_DONE
