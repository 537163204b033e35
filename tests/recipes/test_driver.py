"""The loop of recipes beside a plain loop: bits on one process, parts of a batch, and steps that are not finite."""

import pytest
import torch

from samestep.config import RunOptions
from samestep.distributed.rng import microbatch_seed, seed_generators
from samestep.distributed.world import World
from samestep.errors import NonFiniteError
from samestep.recipes.builder import Built, build
from samestep.recipes.recipe_files import load_recipe
from samestep.recipes.run import evaluated

SMALL = ("data.options.shift=0", "model.options.width=4", "batch_size=128", "optimizer.options.lr=0.1")


def built(world: World, *overrides: str) -> Built:
    return build(load_recipe("digits", [*SMALL, *overrides]), RunOptions(workers=0), world)


def weights(made: Built) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made.driver.model.parameters()]


def test_steps_have_the_bits_of_a_plain_loop(alone: World) -> None:
    made = built(alone)
    other = built(alone)
    optimizer = other.driver.optimizer
    model = other.driver.model
    for number, (batch, same) in enumerate(zip(made.train.batches, other.train.batches, strict=True)):
        result = made.driver.step(batch)
        seed_generators(microbatch_seed("shard", 0, number, 0))
        inputs, targets = same.data
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        other.driver.scheduler.step()
        assert result.loss == float(loss.detach())
    assert all(map(torch.equal, weights(made), weights(other)))
    values = evaluated(made, made.metrics)
    model.eval()
    data = [batch.data for batch in other.evaluation.batches]
    inputs, targets = (torch.cat(column) for column in zip(*data, strict=True))
    with torch.no_grad():
        outputs = model(inputs)
    assert values["samples"] == len(targets) == 360
    assert values["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
    assert values["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)), rel=1e-5)


def test_parts_have_the_gradient_of_the_whole_batch(alone: World) -> None:
    norms = []
    for parts in (1, 3):
        made = built(alone, "model.options.dropout=0", f"accumulate={parts}")
        norms.append(made.driver.step(next(iter(made.train.batches))).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.5)  # batch norm uses the statistics of a part
    assert norms[0] != norms[1]


@pytest.mark.parametrize("reaction", ["stop", "skip"])
def test_a_sample_that_is_not_finite_is_named_or_skipped(alone: World, reaction: str) -> None:
    made = built(alone, f"step.non_finite={reaction}")
    batch = next(iter(made.train.batches))
    batch.data[0][5] = float("nan")
    before = weights(made)
    buffers = [buffer.clone() for buffer in made.driver.model.buffers()]
    if reaction == "stop":
        with pytest.raises(NonFiniteError, match=f"is not finite, from sample {int(batch.samples[5])} ") as error:
            made.driver.step(batch)
        assert error.value.code == "E_NONFINITE"
    else:
        assert made.driver.step(batch).skipped
        assert all(map(torch.equal, buffers, made.driver.model.buffers()))
    assert all(map(torch.equal, before, weights(made)))
