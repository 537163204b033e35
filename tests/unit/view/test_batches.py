"""Batches of which each rank keeps its own rows."""

import pytest

from helpers.forked_ranks import Job, run_jobs
from workers.batch_rows import BATCH, SAMPLES

STEPS = -(-SAMPLES // BATCH)


@pytest.mark.parametrize(
    ("ranks", "reduction"),
    [
        (2, "fast"),
        pytest.param(1, "fast", marks=pytest.mark.slow),
        pytest.param(3, "fast", marks=pytest.mark.slow),
        pytest.param(2, "exact", marks=pytest.mark.slow),
    ],
)
def test_large_tensors_of_batches_stay_divided_and_no_step_gathers_them(ranks: int, reduction: str) -> None:
    (found,) = run_jobs("workers.batch_rows", Job("run", ranks, {"reduction": reduction}))
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-10)
    keeps = ranks > 1 and reduction == "fast"
    # The first batch of the loader and batches with fewer samples than ranks are read whole.
    divided = [keeps and step not in (0, STEPS - 1, 2 * STEPS - 1) for step in range(2 * STEPS)]
    assert found["rows"] == [[one, one] for one in divided]
    if keeps:
        assert [count for step, count in enumerate(found["gathers"]) if divided[step] and step > 1] == [0] * 6
