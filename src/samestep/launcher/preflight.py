"""Requirements of ranks that this machine must meet, checked before a process starts."""

from __future__ import annotations

import os
import resource
import tempfile
from multiprocessing import util

from samestep.distributed.resources import usable_processors
from samestep.errors import InputError

_USUAL_OPEN_FILES = 1024  # default of most systems
# More ranks on one processor are a mistake in the command.
_MAX_RANKS_PER_PROCESSOR = 64
# unix(7): the path of a socket has at most 107 bytes. multiprocessing appends
# `/pymp-12345678/listener-12345678`.
_MAX_FOLDER_BYTES = 107 - 34


def require_machine(processes: int) -> None:
    """Require that `processes` ranks can start on this machine, and raise the limit of open files if necessary.

    Raises:
        InputError: there are too many ranks, too few open files are allowed, or no folder can hold
        a socket.
    """
    _require_processors(processes)
    _require_open_files(processes)
    use_short_temporary_folder()


def _require_processors(processes: int) -> None:
    processors = usable_processors()
    limit = _MAX_RANKS_PER_PROCESSOR * processors
    if processes > limit:
        raise InputError(
            f"{processes} ranks on a machine with {processors} usable processors",
            expected=f"at most {limit} ranks here, {_MAX_RANKS_PER_PROCESSOR} per processor",
            fix=f"--processes {processors}",
            code="E_MACHINE",
        )


def _require_open_files(processes: int) -> None:
    # The launcher needs three per rank, a rank 32 and 4 per rank; workers of loaders need more, and
    # torch ten to spare.
    needed = 48 + 4 * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < needed:
        raise InputError(
            f"a process may open {hard} files here (ulimit -n)",
            expected=f"at least {needed} open files per process for {processes} ranks",
            fix="ulimit -n 1024, or a higher LimitNOFILE= of the service",
            code="E_MACHINE",
        )
    usual = max(_USUAL_OPEN_FILES, needed)
    if soft != unlimited and soft < usual:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (usual if hard == unlimited else min(usual, hard), hard)
        )


def use_short_temporary_folder() -> None:
    """Let `multiprocessing` create its sockets below /tmp if the path of the temporary folder is too long for them.

    Child processes inherit the choice, loader workers too.

    Raises:
        InputError: /tmp is not writable.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= _MAX_FOLDER_BYTES:
        return
    tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()  # the first call creates the folder of all sockets
    except OSError as error:
        raise InputError(
            f"the path of the temporary folder {folder} is too long for sockets, and /tmp is not writable",
            expected=f"at most {_MAX_FOLDER_BYTES} bytes: the kernel limits the paths of sockets",
            fix="set TMPDIR to a folder with a shorter path",
            code="E_MACHINE",
        ) from error
    finally:
        tempfile.tempdir = folder
