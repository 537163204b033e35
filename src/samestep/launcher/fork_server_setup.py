"""Set-up of the fork server, which imports this module first.

No other module may import it: descendants of the server inherit its variable, and would end at
once.
"""

from __future__ import annotations

import gc

from samestep.distributed.env import enter_fork_server
from samestep.distributed.stop_request import die_with_parent

if launcher := enter_fork_server():
    die_with_parent(launcher)
    # Collections take a sixth of the time of the imports, and free nothing; each rank enables them
    # again.
    gc.disable()
