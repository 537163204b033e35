"""Call sites."""

from samestep.distributed.collective_check import call_site


def test_call_site_is_a_line_of_this_file() -> None:
    file, _, line = call_site().rpartition(":")
    assert file.endswith("test_collective_check.py")
    assert int(line) > 1
