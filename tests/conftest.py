"""Fixtures of all tests."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
from hypothesis import settings

from helpers.forked_ranks import TESTS, RankServer
from helpers.leaks import leaks_since, snapshot
from helpers.system import output_to_files
from samestep.cli.commands import PRELOAD as PRELOAD_RECIPES
from samestep.distributed.env import prepare_torch_environment, silence_torch_warnings
from samestep.distributed.world import World
from samestep.launcher.fork_server import PRELOAD, start_server
from samestep.parallelize import world_of_process
from samestep.session import start

# The same examples each time: a change is judged by its own tests, not by chance. No example has a deadline.
settings.register_profile("samestep", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("samestep")


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use folders of trusted components and of caches that are not those of this account."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def torch_environment(state_folder: None) -> None:
    """Set the variables that the first launch sets, and start the fork server of the ranks.

    The server imports the modules of recipes during the first tests, once for all ranks.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started by a shell in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare_torch_environment(loopback=True)
    silence_torch_warnings()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *PRELOAD_RECIPES])
    with output_to_files():
        start_server()


@pytest.fixture(autouse=True)
def fork_server(torch_environment: None) -> Iterator[None]:
    """Start the fork server again after a test that has ended it, so that ranks write to the files of the tests."""
    server: Any = forkserver._forkserver
    before = server._forkserver_pid
    yield
    with output_to_files():
        if server._forkserver_pid != before:
            server._stop()
        start_server()


@pytest.fixture(autouse=True)
def leaves_nothing(fork_server: None, state_folder: None) -> Iterator[None]:
    """Fail a test that leaves an environment variable, a thread, a process, a mode or a process group behind."""
    before = snapshot()
    yield
    left = leaks_since(before)
    assert not left, f"left behind: {', '.join(left)}"


@pytest.fixture
def alone() -> Iterator[World]:
    """This process as a world of one."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        with start(device="cpu", timeout=timedelta(seconds=60)) as world, world_of_process(world):
            yield world
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def on_ranks(request: pytest.FixtureRequest, torch_environment: None) -> Iterator[RankServer]:
    """Run functions of the test file on real ranks: `on_ranks(function, size, **arguments)`."""
    with RankServer(".".join(request.path.relative_to(TESTS).with_suffix("").parts)) as server:
        yield server


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over the tests and the imported modules."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the marker `ranks(1, 2, slow=(4,))` for each number of ranks."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and "ranks" in metafunc.fixturenames:
        slow = [pytest.param(size, marks=pytest.mark.slow) for size in marker.kwargs.get("slow", ())]
        metafunc.parametrize("ranks", [*marker.args, *slow], scope="module")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-page", action="store_true", help="write docs/reference/faults.md from the observations")
    parser.addoption("--record-invariants", action="store_true", help="write tests/parity/invariants.json")
