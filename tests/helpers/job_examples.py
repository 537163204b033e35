"""Files of jobs that the guide to submission shows."""

import re

from helpers.system import TESTS

_FILE = re.compile(r"^```text\n# (first\.\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def job_examples() -> dict[str, str]:
    """Return the files by name."""
    return dict(_FILE.findall((TESTS.parent / "docs/reference/job-files.md").read_text(encoding="utf-8")))
