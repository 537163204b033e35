"""What is noted of a step, in its order, and that noting changes nothing."""

import pytest
import torch
import torch.distributed as dist

import samestep
from batches import random_batch
from models import Perceptron, seeded
from samestep import Loss
from samestep.engine import observer as observing
from samestep.tools.profile.clock import HostClock
from samestep.tools.profile.spans import Spans


def logged(outputs: torch.Tensor, targets: torch.Tensor) -> Loss:
    """A loss that asks all ranks for something, as people do to log it."""
    total = torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")
    dist.all_reduce(total.detach().clone())
    return Loss(total, len(targets))


def engine_of(world: samestep.World, loss: object = samestep.cross_entropy) -> samestep.Engine:
    model = seeded(0, Perceptron)
    return samestep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, world=world)


@pytest.fixture
def spans(alone: samestep.World, monkeypatch: pytest.MonkeyPatch) -> Spans:
    found = Spans(alone, HostClock())
    monkeypatch.setattr(observing, "_observers", [found])
    return found


def test_a_step_is_noted_without_gaps_in_its_order(alone: samestep.World, spans: Spans) -> None:
    engine = engine_of(alone)
    spans.is_on = True
    with spans.step(7):
        spans.enter("data")
        batch = random_batch(alone, 12, 3)
        spans.enter("other")
        engine.step(batch)
    [step] = spans.steps
    assert (step.number, step.shards) == (7, 3)
    assert [each.phase for each in step.segments] == [
        *("data", "other", "other"),
        *("forward", "backward") * 3,
        *("optimizer", "other"),
    ]
    assert all(before.end == after.begin for before, after in zip(step.segments, step.segments[1:], strict=False))
    assert all(0 <= each.cpu <= 1.1 * (each.end - each.begin) + 1e-3 for each in step.segments)


def test_nothing_is_noted_while_it_is_off(alone: samestep.World, spans: Spans) -> None:
    engine = engine_of(alone, logged)
    with spans.listening(), spans.step(1):
        spans.enter("data")
        engine.step(random_batch(alone, 12, 3))
    assert spans.steps == []


def test_collectives_of_the_users_own_are_noted_with_their_line(alone: samestep.World, spans: Spans) -> None:
    engine = engine_of(alone, logged)
    spans.is_on = True
    with spans.listening():
        with spans.step(1):
            spans.enter("data")
            engine.step(random_batch(alone, 12, 3))
        alone.barrier()
    [step] = spans.steps
    sites = [each.site for each in step.meetings if each.site is not None]
    assert len(sites) == 3
    assert all("test_spans.py:" in site for site in sites)
    forwards = [(each.begin, each.end) for each in step.segments if each.phase == "forward"]
    for each in step.meetings:
        assert any(begin <= each.begin <= each.end <= end for begin, end in forwards)
    assert dist.all_reduce.__module__.startswith("torch")
    assert alone.pulse.on_wait is None


def test_weights_are_the_same_with_and_without(alone: samestep.World, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(observers: list[Spans]) -> list[bytes]:
        monkeypatch.setattr(observing, "_observers", observers)
        engine = engine_of(alone)
        for each in observers:
            each.is_on = True
        for seed in range(3):
            engine.step(random_batch(alone, 12, 3, seed=seed))
        return [parameter.detach().numpy().tobytes() for parameter in engine.model.parameters()]

    assert weights([Spans(alone, HostClock())]) == weights([])
