"""Names of other libraries that the adapters use exist in the installed version, which is one of the supported ones."""

import pytest

from helpers.forked_ranks import Job, run_jobs

# The two newest minor versions of each, with which all tests of this folder pass.
SUPPORTED = {"accelerate": ("1.14", "1.15"), "lightning": ("2.5", "2.6"), "transformers": ("5.22", "5.23")}


@pytest.mark.slow
def test_private_names_exist_in_supported_versions() -> None:
    missing, versions = run_jobs("workers.contracts", Job("missing", 1, {}), Job("versions", 1, {}))
    assert missing == []
    for name, supported in SUPPORTED.items():
        assert ".".join(versions[name].split(".")[:2]) in supported, name
