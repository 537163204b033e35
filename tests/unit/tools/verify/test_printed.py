"""Printed lines that differ are noted."""

from pathlib import Path

from samestep.tools.verify.printed import printed_note
from samestep.tools.verify.record import Record


def record(place: Path, processes: int, text: str | None) -> Record:
    folder = place / str(processes)
    folder.mkdir()
    if text is not None:
        (folder / "output-0.log").write_text(text)
    return Record(processes, folder, ())


def test_the_first_line_that_differs_is_shown(tmp_path: Path) -> None:
    one = record(tmp_path, 1, "begin\naccuracy 0.7\nend\n")
    assert printed_note(one, [record(tmp_path, 2, "begin\naccuracy 0.7\nend\n")]) == ()
    [note] = printed_note(one, [record(tmp_path, 3, "begin\naccuracy 0.6\nend\n")])
    assert "'accuracy 0.7' on 1 and 'accuracy 0.6' on 3 processes" in note


def test_recipes_print_nothing(tmp_path: Path) -> None:
    assert printed_note(record(tmp_path, 1, None), [record(tmp_path, 2, None)]) == ()
