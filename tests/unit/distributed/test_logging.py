"""Logger `samestep` for diagnostics."""

import os
import subprocess
import sys

LOG = """
import logging
from samestep.distributed.logging import configure_logging, logger
{setup}
for rank in (None, 3):
    configure_logging(rank)
    logger.debug("debug")
    logger.info("info %d%%", 5)
    logger.warning("warning")
"""


def stderr_lines(setup: str = "", level: str | None = None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SAMESTEP_LOG_LEVEL"}
    environment |= {"SAMESTEP_LOG_LEVEL": level} if level else {}
    command = [sys.executable, "-c", LOG.format(setup=setup)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=True, timeout=60)
    return done.stderr.splitlines()


def test_environment_variable_sets_the_level_and_adds_level_and_rank() -> None:
    lines = stderr_lines(level="debug")
    assert [line.split(" ", 2)[2] for line in lines] == [
        *("DEBUG rank -: debug", "INFO rank -: info 5%", "WARNING rank -: warning"),
        *("DEBUG rank 3: debug", "INFO rank 3: info 5%", "WARNING rank 3: warning"),
    ]
    assert stderr_lines(level="ERROR") == []
