"""Certificates written by `samestep verify --out`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep.errors import InputError
from samestep.tools.verify.verification import FORMAT

CERTIFICATE_FILE = "certificate.json"


def read_certificate_file(path: Path) -> dict[str, Any]:
    """Return `holds`, `subject` and the verified `recipe` of a certificate, which is None for a script.

    Raises:
        InputError: the certificate is missing, damaged or of another format.
    """
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        return {
            "holds": bool(data["holds"]),
            "subject": " ".join([str(data["subject"]), *map(str, data["arguments"])]),
            "recipe": None if data["recipe"] is None else dict(data["recipe"]),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path} cannot be read: {cause}",
            expected=f"a folder written by samestep verify --out, which contains {path.name}",
            fix="correct the path, or repeat samestep verify --out",
            code="E_UNREADABLE",
        ) from error
