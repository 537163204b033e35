"""`--report`: an evaluation class by class, as a table, a picture and a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samestep.errors import InputError, RunError
from samestep.record.class_table import averages, class_rows, table_lines


def add_option(parser: Any) -> None:
    """Describe the option."""
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="also precision, recall and F1 of each class: classes.json and confusion.png in DIR",
    )


def prepare(folder: Path | None) -> None:
    """See, before anything is computed, that a report can be written there, if one is wanted.

    Raises:
        InputError: it cannot.
    """
    if folder is None:
        return
    # Imported here: the other commands have no use for numpy.
    from samestep.record.confusion import require_pictures

    require_pictures("confusion matrix")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--report {folder}: {error.strerror}", rule="a folder, or one that can be made", do="name another one"
        ) from error


def write(folder: Path, found: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """Write the report, and return what a person should see of it.

    Args:
        found: the names of the classes, and `counts[class][taken for]`; how many pictures there are, if any.
        about: what else `classes.json` says: which weights, and the numbers of the whole evaluation.

    Raises:
        RunError: it cannot be written.
    """
    names, counts = found["classes"], found["counts"]
    rows = class_rows(counts, names)
    data = {**about, **averages(rows), "classes": [asdict(row) for row in rows], "confusion": counts}
    table, picture = folder / "classes.json", folder / "confusion.png"
    try:
        table.write_text(json.dumps(data) + "\n", encoding="utf-8")
        from samestep.record.confusion import draw_confusion

        draw_confusion(counts, names, picture)
    except OSError as error:
        raise RunError(
            f"--report {folder} cannot be written: {error.strerror}", do="make room on the disk, or name another folder"
        ) from error
    written = [str(table), str(picture), *([str(folder / "overlays")] if found.get("pictures") else [])]
    return ["", *table_lines(rows), "", f"{'report':<12}{', '.join(written)}"]
