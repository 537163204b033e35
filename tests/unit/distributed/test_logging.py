"""Logger `samestep` for diagnostics."""

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


def stderr_lines(setup: str = "") -> list[str]:
    command = [sys.executable, "-c", LOG.format(setup=setup)]
    done = subprocess.run(command, text=True, capture_output=True, check=True, timeout=60)
    return done.stderr.splitlines()


def test_messages_are_plain_text_unless_the_script_has_set_a_level() -> None:
    assert stderr_lines() == ["info 5%", "warning"] * 2
    assert stderr_lines("logger.setLevel(logging.ERROR)") == []
