"""Several ranks on one GPU: `pytest -m gpu` on a machine with one."""

from pathlib import Path

import pytest
import torch

import samestep
from helpers.started import Variables, as_mpirun, as_srun, as_torchrun, free_port, ranks
from samestep.config import MeshConfig, StepConfig, StrategyConfig
from samestep.launcher.launch import RankError, launch
from workers.reductions import LONG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
RANKS = (2, 3, 4)


def train(strategy: StrategyConfig | None, *, share_gpu: bool = True) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and full weights of three steps in float64."""
    with samestep.start(device="cuda", strategy=strategy, share_gpu=share_gpu) as world:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 600), torch.nn.Dropout(0.2), torch.nn.Linear(600, 8)).double()
        dataset = torch.utils.data.TensorDataset(torch.randn(48, 16).double(), torch.randint(8, (48,)))
        config, optimizer = StepConfig(clip_norm=1.0), torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world, config=config)
        losses = [
            engine.step(batch).loss for batch in samestep.loader(dataset, batch_size=16, microbatches=8, world=world)
        ]
        local = engine.local_parameters
        return losses, [local.full_tensor(name, p.detach()).cpu() for name, p in local.local.items()]


def backend_and_sum() -> tuple[bool, float]:
    with samestep.start(device="cuda", share_gpu=True) as world:
        values = torch.ones(LONG, device=world.device)
        world.all_reduce(values)
        return world.stages_messages, float(values.sum())


@pytest.mark.parametrize("ranks", RANKS)
def test_exact_has_the_bits_of_one_rank(ranks: int) -> None:
    losses, weights = launch(train, None, processes=1)
    shared_losses, shared = launch(train, None, processes=ranks)
    assert shared_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(shared, weights, strict=True))


def test_messages_are_staged_and_collectives_are_not() -> None:
    assert launch(backend_and_sum, processes=2) == (True, 2.0 * LONG)


@pytest.mark.parametrize(
    "strategy", [StrategyConfig(name="fsdp"), StrategyConfig(name="hsdp", mesh=MeshConfig(replicate=2, shard=2))]
)
def test_divided_models_agree_with_one_rank_to_rounding(strategy: StrategyConfig) -> None:
    _, weights = launch(train, None, processes=1)
    _, shared = launch(train, strategy, processes=4)
    for tensor, expected in zip(shared, weights, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-10)


def unshared() -> None:
    train(None, share_gpu=False)


def test_two_ranks_on_one_gpu_are_refused_by_name() -> None:
    last = torch.cuda.device_count()
    with pytest.raises(RankError, match=f"rank {last} of this machine has no GPU of its own"):
        launch(unshared, processes=last + 1)


@pytest.mark.parametrize("variables", [as_mpirun, as_srun("71"), None], ids=["mpirun", "srun", "torchrun"])
def test_ranks_of_other_launchers_with_one_visible_gpu_are_refused(variables: Variables | None, tmp_path: Path) -> None:
    """Under srun and mpirun, each rank may see its own GPU as the only one; here both see the same."""
    arguments = ("train", "digits", "--device", "cuda", "--set", "epochs=1")
    started = variables or as_torchrun(free_port())
    with ranks(started, 2, *arguments, cwd=tmp_path, more={"CUDA_VISIBLE_DEVICES": "0"}) as processes:
        ended = processes.wait()
    errors = "".join(done.err for done in ended)
    assert all(done.code for done in ended)
    assert "E_DEVICES" in errors and "ranks 0 and 1" in errors


def test_ranks_of_other_launchers_can_share(tmp_path: Path) -> None:
    arguments = ("train", "digits", "--device", "cuda", "--share-gpu", "--set", "epochs=1")
    with ranks(as_mpirun, 2, *arguments, cwd=tmp_path, more={"CUDA_VISIBLE_DEVICES": "0"}) as processes:
        assert [done.code for done in processes.wait()] == [0, 0]


def test_pipelines_are_refused() -> None:
    with pytest.raises(RankError, match="ranks that share GPUs"):
        launch(train, StrategyConfig(name="pp"), processes=2)
