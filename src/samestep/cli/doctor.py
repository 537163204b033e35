"""`samestep doctor`: check this machine before training; list and remove caches of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, get_args

from samestep.cli.commands import PRELOAD
from samestep.cli.launch_options import parse_process_count
from samestep.cli.options import JsonOption, count, option
from samestep.config import default_workers
from samestep.distributed.env import cache_folder
from samestep.distributed.resources import usable_processors
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, printable
from samestep.tools.doctor import Finding, Plan, Verdict, check_machine, read_nvidia
from samestep.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    """Check packages, GPUs, memory, limits, launcher and runs folder, and run a short self-test.

    Each finding is pass, info, warn or fail; warn and fail include a fix. Nothing is changed. Exit
    codes: 0 no failure, 2 invalid input, 3 at least one failure.
    """

    example: ClassVar = "samestep doctor --processes 8 --workers 4"

    processes: str = option(
        "ranks on this machine (default: one per GPU, else per core)", "N", default="auto"
    )
    workers: int | None = option(
        "loader processes per rank (default: depends on the cores)", "N", type=count
    )
    runs: Path = option("folder of runs (default runs)", "DIR", default=Path("runs"))
    quick: bool = option("skip the self-test; torch is not imported", default=False)
    caches: bool = option("list the caches of images in ~/.cache/samestep", default=False)
    clear_caches: bool = option(
        "list and remove the caches; runs that use one continue", default=False
    )


def run(options: Options) -> int:
    """Check and print; return 0 without failures and 3 otherwise."""
    if options.caches or options.clear_caches:
        _show_caches(options)
        return EXIT_DONE
    nvidia = read_nvidia()
    usable = usable_processors()
    processes = len(nvidia.gpus) or usable
    if options.processes != "auto":
        processes = parse_process_count(options.processes)
    workers = default_workers(usable, processes) if options.workers is None else options.workers
    plan = Plan(processes, workers)
    findings = list(check_machine(plan, nvidia, options.runs, quick=options.quick, preload=PRELOAD))
    verdict: Verdict = max((finding.verdict for finding in findings), key=get_args(Verdict).index)
    data = {
        "verdict": verdict,
        "plan": str(plan),
        "findings": [asdict(finding) for finding in findings],
    }
    options.result(data, *_lines(findings))
    if verdict == "fail":
        return EXIT_DIFFERS
    return EXIT_DONE


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.verdict}  {finding.name:<24} {finding.value}"
        if finding.expected is not None:
            yield f"      {'expected':<24} {finding.expected}"
            yield f"      {'fix':<24} {finding.fix}"
    counts = Counter(finding.verdict for finding in findings)
    yield ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict))


def _show_caches(options: Options) -> None:
    from samestep.zoo.sample_cache import list_caches, remove_cache

    caches = list_caches()
    if options.clear_caches:
        for cache in caches:
            remove_cache(cache.name)
    title = "removed" if options.clear_caches else "caches"
    size = sum(cache.bytes for cache in caches)
    lines = [
        printable(
            f"{cache.name}  {cache.kind}  {cache.entries} entries  {format_bytes(cache.bytes)}  {cache.source}"
        )
        for cache in caches
    ]
    total = f"{title}: {len(caches)}, {format_bytes(size)} in {cache_folder()}"
    data = {
        "folder": str(cache_folder()),
        title: [asdict(cache) for cache in caches],
        "bytes": size,
    }
    options.result(data, *lines, total)
