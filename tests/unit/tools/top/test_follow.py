"""Lines are read once, when they are whole."""

import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.top.follow import Follower


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_file_that_is_not_there_yet_has_no_lines(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "a")
    assert list(follower.new_lines()) == []
    append(tmp_path / "a", b"one\n")
    assert list(follower.new_lines()) == [b"one"]
    assert list(follower.new_lines()) == []


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "a")
    text = "é\n".encode()
    append(tmp_path / "a", b"one\ntw" + text[:1])
    assert list(follower.new_lines()) == [b"one"]
    append(tmp_path / "a", text[1:])
    assert list(follower.new_lines()) == ["twé".encode()]


@given(st.lists(st.binary(max_size=12)), st.integers(1, 5))
def test_however_it_is_written_the_lines_are_the_files(pieces: list[bytes], every: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, found = Path(folder) / "a", list[bytes]()
        follower = Follower(path)
        for number, piece in enumerate(pieces):
            append(path, piece)
            if number % every == 0:
                found += follower.new_lines()
        found += follower.new_lines()
        assert found == b"".join(pieces).split(b"\n")[:-1]


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    follower = Follower(path)
    append(path, b"one\n")
    assert list(follower.new_lines()) == [b"one"]
    with path.open("r+b") as file:  # nobody does that; it shows what is read
        file.write(b"two")
    append(path, b"three\n")
    assert list(follower.new_lines()) == [b"three"]


def test_another_file_in_its_place_and_a_shorter_one_are_read_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a"
    follower = Follower(path)
    append(path, b"one\nhalf")
    assert list(follower.new_lines()) == [b"one"]
    append(tmp_path / "b", b"of another one, and longer\n")
    (tmp_path / "b").replace(path)
    assert list(follower.new_lines()) == [b"of another one, and longer"]
    os.truncate(path, 0)
    append(path, b"short\n")
    assert list(follower.new_lines()) == [b"short"]


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    append(tmp_path / "a", b"".join(b"line %04d\n" % number for number in range(1000)))
    follower = Follower(tmp_path / "a", last_bytes=25)
    assert list(follower.new_lines()) == [b"line 0998", b"line 0999"]
    append(tmp_path / "a", b"line 1000\n")
    assert list(follower.new_lines()) == [b"line 1000"]
