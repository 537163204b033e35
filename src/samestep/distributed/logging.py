"""Logger `samestep` for diagnostics, with the rank in every record."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from samestep.distributed.env import read_log_level
from samestep.report_limits import printable

logger = logging.getLogger("samestep")


class _RankFilter(logging.Filter):
    """Adds the rank to every record."""

    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = "-" if self.rank is None else self.rank
        return True


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters, which a message can have from a file name or an exception."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which ranks and tests replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_rank_filter = _RankFilter()
logger.addFilter(_rank_filter)


def configure_logging(rank: int | None = None) -> None:
    """Set the rank and the level of the logger, and add a handler for stderr.

    Without SAMESTEP_LOG_LEVEL, messages of level INFO and above are written as plain text. With the variable, each line
    also has the time, the level and the rank.

    Args:
        rank: rank of this process, whose program may have configured logging: then no handler is added. None in the
            `samestep` command, which has no other configuration.

    Raises:
        InputError: SAMESTEP_LOG_LEVEL is not a level.
    """
    level = read_log_level()
    _rank_filter.rank = rank
    logger.setLevel(level or logging.INFO)
    if not logger.handlers and (rank is None or not logger.hasHandlers()):
        handler = _StderrHandler()
        text = "%(message)s" if level is None else "%(asctime)s %(levelname)s rank %(rank)s: %(message)s"
        handler.setFormatter(_PrintableFormatter(text))
        logger.addHandler(handler)
