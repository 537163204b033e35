"""How many messages torch's own buckets are."""

import pytest

from samestep.tools.profile.costs import bucket_count

MEGABYTE = 2**20


@pytest.mark.parametrize(
    ("size", "buckets"), [(0, 1), (MEGABYTE, 1), (MEGABYTE + 4, 2), (26 * MEGABYTE, 2), (100 * MEGABYTE, 5)]
)
def test_a_small_bucket_goes_first(size: int, buckets: int) -> None:
    assert bucket_count(size) == buckets
