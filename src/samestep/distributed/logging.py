"""Logger `samestep` for diagnostics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from samestep.report_text import printable

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("samestep")


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters, which a message can have from a file name or an exception."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


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
        # Private: writes to the current `sys.stderr`, which ranks and tests replace.
        handler = logging._StderrHandler()  # type: ignore[attr-defined]
        handler.setFormatter(_PrintableFormatter("%(message)s"))
        logger.addHandler(handler)
