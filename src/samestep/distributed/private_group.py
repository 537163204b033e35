"""A process group of all ranks that is not torch's default group.

A script under the global view is written for one process: it must find no default group. torch
creates groups only beside a default one, so the group is created as the default group and hidden
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _update_default_pg,
)  # private: torch has no public way to hide a group


def hide_default_group() -> dist.ProcessGroup:
    """Hide torch's default group, and return it. Collectives with `group=` use it as before."""
    group = dist.group.WORLD
    assert group is not None
    _update_default_pg(None)
    return group


def show(group: dist.ProcessGroup) -> None:
    """Make a hidden group the default one, for code that needs a default group throughout, such as torch's DDP."""
    _update_default_pg(group)


@contextmanager
def shown(group: dist.ProcessGroup) -> Iterator[None]:
    """Make a hidden group the default one inside the block, for functions of torch that need one: `new_group`."""
    before = dist.group.WORLD
    _update_default_pg(group)
    try:
        yield
    finally:
        _update_default_pg(before)


def destroy(group: dist.ProcessGroup | None) -> None:
    """Destroy a hidden group, with the groups beside it unless the script has a default group; or the default group."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
        return
    if group is not None:
        _update_default_pg(group)
    dist.destroy_process_group()
