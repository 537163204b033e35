"""Notes of a verification on printed output."""

from pathlib import Path

from samestep.tools.verify_engine.trials import Record
from samestep.tools.verify_engine.verification import output_note


def record(parent: Path, processes: int, text: str | None) -> Record:
    folder = parent / str(processes)
    folder.mkdir()
    if text is not None:
        (folder / "output-0.log").write_text(text)
    return Record(processes, folder, ())


def test_first_different_line_is_reported(tmp_path: Path) -> None:
    one = record(tmp_path, 1, "begin\naccuracy 0.7\nend\n")
    assert output_note(one, [record(tmp_path, 2, "begin\naccuracy 0.7\nend\n")]) == ()
    [note] = output_note(one, [record(tmp_path, 3, "begin\naccuracy 0.6\nend\n")])
    assert "'accuracy 0.7' on 1 and 'accuracy 0.6' on 3 processes" in note


def test_recipes_have_no_output(tmp_path: Path) -> None:
    assert output_note(record(tmp_path, 1, None), [record(tmp_path, 2, None)]) == ()
