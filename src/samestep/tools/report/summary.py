"""The same as the page, in short and for programs."""

from __future__ import annotations

from typing import Any

from samestep.tools.report.page import Report
from samestep.tools.report.recipe_keys import differing
from samestep.tools.report.run import Run


def summary(report: Report) -> dict[str, Any]:
    """`runs`, `differences` of their recipes, `certificates` and `notes`, as plain data."""
    return {
        "runs": [_run(run) for run in report.runs],
        "differences": differing([run.recipe for run in report.runs]),
        "certificates": [
            {"path": str(found.path), "holds": found.holds, "summary": found.sentence}
            for _, found in report.certificates
        ],
        "notes": [*report.remarks, *(f"{run.name}: {remark}" for run in report.runs for remark in run.remarks)],
    }


def _run(run: Run) -> dict[str, Any]:
    best, curves = run.best, run.events.curves
    loss = curves["loss"].series(run.clock).extremes()
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "steps": run.events.step,
        "seconds": round(run.clock.total, 3),
        "resumed": len(run.events.resumed),
        "train_loss": None if loss is None else loss["last"],
        "deciding": run.deciding,
        "best": {"step": best["step"], **run.evaluated(best)} if best else None,
        "last": {"step": run.last["step"], **run.evaluated(run.last)} if run.last else None,
        "samples_per_second": run.typical("samples_per_second"),
        "data_share": run.data_share(),
        "ranks": [
            {
                "rank": log.rank,
                "data_share": log.mean("data"),
                "wait_share": log.mean("others"),
                "memory_bytes": log.most("memory"),
            }
            for log in run.ranks
        ],
        "checkpoints": [
            {"step": saved.step, "bytes": saved.size, "names": list(saved.names)} for saved in run.checkpoints
        ],
    }
