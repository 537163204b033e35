"""A person's own script as one rank of a launch."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

from samestep.runtime.env import set_environment
from samestep.runtime.session import host_store, seat, seat_port

_TIMEOUT = timedelta(minutes=10)


def run_script(script: Path, arguments: tuple[str, ...], restarts: int, max_restarts: int) -> None:
    """Run `script` as `python script.py arguments` would, in each rank.

    It may join the others by `samestep.start()`, or by `torch.distributed.init_process_group()` as under torchrun,
    whose variables are set (https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"). The store
    is there already, as torchrun's agent has it, so that nobody opens a port to the world.

    Args:
        restarts: how often the launch was started anew.
    """
    host_store(_TIMEOUT)
    rank, size = seat()
    set_environment(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": str(size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(seat_port()),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_RUN_ID": "samestep",
        }
    )
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    # It stays: when a script drops its models, and the last process group with them, torch waits for threads of gloo
    # that may wait for Python's lock in turn.
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(script)
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), vars(main))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
