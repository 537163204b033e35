"""A loss of the whole batch has the results of one process with every layout that supports it."""

from typing import Any

import pytest
import torch

from samestep import launch
from workers import global_losses as ranks_global_losses
from workers.global_losses import BY_RANKS
from workers.layouts import LAYOUTS, LAYOUTS_OF_MODEL

REFUSED = [name for name in LAYOUTS if "pp" in name or name == "dp"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["chain", "full"])
def test_results_are_those_of_one_process(model: str) -> None:
    results: dict[str, dict[str, Any]] = launch(ranks_global_losses.train_all, ["single"], model, processes=1)
    for ranks, layouts in BY_RANKS.items():
        names = [name for name in layouts if name in LAYOUTS_OF_MODEL[model] and name not in (*REFUSED, "fsdp (meta)")]
        results |= launch(ranks_global_losses.train_all, names, model, processes=ranks)
    single = results.pop("single")
    assert len(results) >= 8
    for name, result in results.items():
        assert result["losses"] == pytest.approx(single["losses"], rel=1e-10), name
        assert result["evaluation"] == pytest.approx(single["evaluation"], rel=1e-10), name
        for key, tensor in single["weights"].items():
            torch.testing.assert_close(result["weights"][key], tensor, rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")
        if LAYOUTS[name][1].is_exact(1):
            assert result["losses"] == single["losses"], name
            assert all(torch.equal(result["weights"][key], tensor) for key, tensor in single["weights"].items()), name


@pytest.mark.slow
def test_layouts_without_all_outputs_on_a_rank_are_refused() -> None:
    codes: dict[str, str] = {}
    for ranks, layouts in BY_RANKS.items():
        codes |= launch(ranks_global_losses.refusals, [name for name in layouts if name in REFUSED], processes=ranks)
    assert codes == dict.fromkeys(REFUSED, "E_INCOMPATIBLE")
