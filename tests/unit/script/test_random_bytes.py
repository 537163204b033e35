"""Random bytes that are equal on all ranks."""

import multiprocessing
import os
import random
import secrets
import tempfile
import threading
import uuid
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import samestep
from samestep.distributed.rng import seed_generators
from samestep.script.random_bytes import equal_entropy

SEED = b"sixteen bytes or"


def _seeded(seed: Callable[[], Any], draw: Callable[[], Any]) -> Any:
    seed()
    return draw()


DRAWS: dict[str, Callable[[], Any]] = {
    "Random": lambda: random.Random().random(),
    "random.seed": lambda: _seeded(random.seed, random.random),
    "random.seed(None)": lambda: _seeded(lambda: random.seed(None), random.random),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "default_rng": lambda: numpy.random.default_rng().random(),
    "SeedSequence": lambda: numpy.random.SeedSequence().entropy,
    "RandomState": lambda: numpy.random.RandomState().random_sample(),
    "MT19937": lambda: numpy.random.MT19937().random_raw(),
    "numpy.random.seed": lambda: _seeded(numpy.random.seed, numpy.random.random_sample),
    "numpy.random.seed(None)": lambda: _seeded(lambda: numpy.random.seed(None), numpy.random.random_sample),
    "torch.seed": lambda: (torch.seed(), torch.rand(2).tolist()),
    "torch.random.seed": lambda: (torch.random.seed(), torch.rand(2).tolist()),
    "uuid4": uuid.uuid4,
    "uuid1": lambda: [uuid.uuid1()],
    "secrets": lambda: (secrets.token_hex(), secrets.randbelow(10**12), secrets.choice(range(10**9))),
    "os.urandom": lambda: os.urandom(200),
}


def twice(draw: Callable[[], Any], seed: bytes = SEED) -> list[Any]:
    numpy.random.seed(0)  # a seed from the operating system keeps the position of NumPy's generator
    with equal_entropy(seed, {}):
        return [draw() for _ in range(2)]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_are_a_function_of_the_seed_inside_the_block(draw: Callable[[], Any]) -> None:
    first, second = twice(draw)
    assert first != second
    assert twice(draw) == [first, second]
    assert twice(draw, b"another seed....") != [first, second]
    assert draw() != draw()


def test_generators_are_restored() -> None:
    owners = (os, uuid, random, random.Random, numpy.random, torch, torch.random)
    before = [dict(vars(owner)) for owner in owners]
    with equal_entropy(SEED, {}):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


def test_draws_of_other_lines_are_equal_after_a_draw_on_one_rank() -> None:
    def rank(number: int) -> list[Any]:
        with equal_entropy(SEED, {}):
            if number == 0:
                numpy.random.default_rng()
            return [numpy.random.default_rng().random(), uuid.uuid4()]

    assert rank(0) == rank(1)


def test_seeded_generators_stay_as_they_are() -> None:
    def seeded() -> list[Any]:
        random.seed("text")
        numpy.random.seed(3)
        torch.manual_seed(4)
        return [random.random(), random.Random(5).random(), numpy.random.random_sample(), torch.rand(1).item()]

    before = seeded()
    with equal_entropy(SEED, {}):
        assert seeded() == before


def test_version_and_subclass_of_random_are_kept() -> None:
    class Own(random.Random):
        pass

    with equal_entropy(SEED, {}):
        draws = [Own(3).random(), random.Random(3).random()]
        own = random.Random()
        own.seed("text", version=1)
    expected = random.Random()
    expected.seed("text", version=1)
    assert draws[0] == draws[1]
    assert own.random() == expected.random()


def test_other_threads_and_names_of_temporary_files_are_random() -> None:
    drawn: list[bytes] = []

    def draw() -> None:
        drawn.append(os.urandom(16))

    for _ in range(2):
        with equal_entropy(SEED, {}):
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()
            sequence: Any = tempfile._RandomNameSequence()  # type: ignore[attr-defined]
            drawn.append(next(sequence))
    assert len(set(drawn)) == 4


def test_last_seeds_are_recorded_with_their_lines() -> None:
    seeds: dict[str, Any] = {}
    with equal_entropy(SEED, seeds):
        torch.manual_seed(1)
        torch.random.manual_seed(seed=2)
        random.seed(1.5)
        numpy.random.seed(7)
        numpy.random.seed()
    assert {name: value for name, (_, value) in seeds.items()} == {
        "torch.manual_seed": "2",
        "random.seed": "1.5",
        "numpy.random.seed": "7",
    }
    assert all(line[0] == __file__ for line, _ in seeds.values())
    assert seeds["numpy.random.seed"][0][1] == seeds["random.seed"][0][1] + 1


def test_seeds_of_samples_are_not_recorded() -> None:
    seeds: dict[str, Any] = {}
    with equal_entropy(SEED, seeds):
        random.seed(3)
        seed_generators(4)
    assert [(name, value) for name, (_, value) in seeds.items()] == [("random.seed", "3")]


def _child(connection: Any) -> None:
    connection.send(os.urandom(8).hex())


def _rank(folder: Path) -> list[Any]:
    """Draw on a rank, and use what needs names of its own; return the draws of all ranks."""
    world = samestep.init(device="cpu")
    with equal_entropy(SEED, {}):
        equal = [str(uuid.uuid4()), random.Random().random(), numpy.random.default_rng().random(), hash("text")]
        torch.manual_seed(0)
        equal.append(len({"a", "b", "c"}))
        own = [tempfile.mkdtemp(dir=folder)]
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            own.append(file.name)
        memory = SharedMemory(create=True, size=8)
        own.append(memory.name)
        semaphores = [multiprocessing.get_context("fork").Lock() for _ in range(20)]
        receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_child, args=(send,))
        child.start()
        own.append(receive.recv())
        child.join()
        with multiprocessing.get_context("spawn").Manager() as manager:  # a socket, and keys of both sides
            shared = manager.list([world.rank])
            equal.append(len(shared))
        world.barrier()
        memory.close()
        memory.unlink()
        assert len(semaphores) == 20
    return list(samestep.all_gather([equal, own], world))


@pytest.mark.slow
def test_ranks_draw_equal_numbers_and_have_own_names(tmp_path: Path) -> None:
    ranks = samestep.launch(_rank, tmp_path, processes=3)
    equal, own = zip(*ranks, strict=True)
    assert equal[0] == equal[1] == equal[2]
    assert all(len(set(names)) == 3 for names in zip(*own, strict=True))
