"""Logger `samestep` for diagnostics."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, TextIO

from samestep.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("samestep")


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


def plain_console(**options: Any) -> Console:
    """Return a console of rich that prints text as it is.

    Names of folders, classes and runs have brackets and colons, which are neither markup nor emoji.
    """
    from rich.console import Console  # slow, and most commands print no table

    return Console(markup=False, emoji=False, highlight=False, **options)


def configure_logging(rank: int | None = None) -> None:
    """Write messages of level INFO and above to stderr, unless the script has decided otherwise.

    `rank` is None in the `samestep` command; the program of a rank may have configured logging.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers and (rank is None or not logger.hasHandlers()):
        handler = _StderrHandler()
        handler.setFormatter(_PrintableFormatter("%(message)s"))
        logger.addHandler(handler)
