"""Rows of the fault page from the tests of surroundings, and runs without a fault."""

from collections.abc import Iterator

import pytest

from helpers.fault_page import PAGE, Row, area_rows, write_area
from helpers.surroundings import RecordFault
from helpers.system import here, weights


@pytest.fixture(scope="module")
def area(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Rows recorded by the cases of one file; with `--faults-page` they replace the table of the file."""
    rows: list[Row] = []
    yield rows
    if request.config.getoption("--faults-page"):
        write_area(request.path.stem.removeprefix("test_"), rows)


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Weights of a run of the recipe of a file without a fault."""
    path = tmp_path_factory.mktemp("undisturbed")
    assert here("train", request.module.RECIPE, "--name", "a", cwd=path) == 0
    return weights(path / "runs/a")


@pytest.fixture
def record_fault(area: list[Row], request: pytest.FixtureRequest) -> RecordFault:
    """Record a case; without `--faults-page`, require its row on the page.

    To write the table of a file, run all of its cases: `pytest tests/faults/test_NAME.py --faults-page`.
    """

    def record(fault: str, observed: str) -> None:
        area.append(Row(fault, observed))
        if not request.config.getoption("--faults-page"):
            rows = area_rows(PAGE.read_text(encoding="utf-8"), request.path.stem.removeprefix("test_"))
            assert fault in [row.fault for row in rows], "run this file with --faults-page"

    return record
