"""Prefix of the keys of a job in a store. Launchers import this module, which does not import torch."""

from __future__ import annotations

import hashlib


def job_prefix(token: str | None) -> str:
    """Return the prefix of all keys of the job with a token, which cannot be read from the prefix."""
    return f"samestep/{hashlib.sha256(token.encode()).hexdigest() if token is not None else 'no-token'}"
