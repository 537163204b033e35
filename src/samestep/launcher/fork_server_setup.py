"""Set-up of the fork server, which imports this module first. In other processes the import does nothing."""

from __future__ import annotations

import sys

from samestep.distributed.env import enter_fork_server
from samestep.distributed.signals import die_with_parent

_launcher = enter_fork_server()
if _launcher is not None:
    sys.path.append("")  # modules that the user wants to preload; last, so that no file there replaces a module
    if _launcher:
        die_with_parent(_launcher)
