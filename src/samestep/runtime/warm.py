"""Imported by the fork server, and only by it, before anything else.

A SIGTERM to the whole process group, as a batch system sends it, must not end the server: the ranks, which want to
reach the end of their step, would die with it. They inherit this until they listen for the signal themselves.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
