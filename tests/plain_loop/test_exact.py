"""The reduction `exact`: the same bits on every number of processes. `make plain-loop` runs all scripts."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plain_loop.exact import ExactVerdict
from plain_loop.script import find_scripts

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}:{ROOT}"}
FREQUENT = ("port_hard_plain", "train_several_calls_and_backwards")  # dropout and batch norm; several calls
PARTS = 12  # one of which belongs to the slow part


def run(names: list[str], processes: str, folder: Path, *, threads: int = 1, layouts: str = "") -> list[ExactVerdict]:
    output = folder / "verdicts.json"
    command = [sys.executable, "-m", "plain_loop.exact", *names, "--processes", processes, "--json", str(output)]
    command += ["--threads", str(threads), "--layouts", layouts]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert output.exists(), done.stdout + done.stderr
    return [ExactVerdict(**row) for row in json.loads(output.read_text(encoding="utf-8"))]


@pytest.mark.slow
def test_some_scripts_have_the_same_bits(tmp_path: Path) -> None:
    for verdict in run(list(FREQUENT), "1,2,3", tmp_path):
        assert (verdict.equal, verdict.problem, verdict.calls) == ([1, 2, 3], "", "divided"), verdict.script


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_more_scripts_have_the_same_bits_on_more_processes(tmp_path: Path) -> None:
    names = [
        script.name
        for script in find_scripts([])
        if hashlib.sha256(script.name.encode()).digest()[2] % PARTS == 0 and not script.needs
    ]
    verdicts = run(names, "1,2,3,5,8", tmp_path)
    assert [f"{verdict.script}: {verdict.problem}" for verdict in verdicts if verdict.problem] == []
    assert sum(verdict.calls == "divided" for verdict in verdicts) >= len(names) // 3
    assert all(verdict.equal + verdict.refused == [1, 2, 3, 5, 8] for verdict in verdicts)


@pytest.mark.long
def test_operations_with_several_threads_have_the_same_bits(tmp_path: Path) -> None:
    """Slices of a call with sums inside run in threads of their own, where a rank has several."""
    names = ["port_cifar", "layer_batch_norm_1d_3d", "layer_transformer_encoder_dropout", "loss_classification_inside"]
    for verdict in run(names, "1,3,8", tmp_path, threads=2):
        assert (verdict.equal, verdict.problem, verdict.calls) == ([1, 3, 8], "", "divided"), verdict.script


@pytest.mark.slow
def test_more_ranks_than_microbatches_are_refused(tmp_path: Path) -> None:
    """The first batch has 7 rows."""
    (verdict,) = run(["layer_gru_sequence_first"], "1,8", tmp_path)
    assert (verdict.equal, verdict.refused, verdict.problem) == ([1], [8], "")


@pytest.mark.slow
def test_layouts_have_the_same_bits(tmp_path: Path) -> None:
    """Several kinds of calls; parameters that a whole call writes; a rank that takes another way does not hang."""
    equal = {"fsdp:3": "equal", "pp:2": "equal"}
    # Stages are traced: not those of a counter, of gradients of inputs, or of a function with effects.
    expected = {
        "port_mnist": equal,
        "layer_embedding_max_norm": equal,
        "parity_main_sets_eval_of_a_part": {},
        "layer_buffer_counts_calls": {**equal, "pp:2": "close"},
        "port_dcgan": {**equal, "pp:2": "close"},
        "parity_helper_counter": {**equal, "pp:2": "E_PIPELINE"},
    }
    found = run(list(expected), "1", tmp_path, layouts=",".join(equal))
    assert [verdict.problem for verdict in found] == [""] * len(expected)
    assert {verdict.script: verdict.layouts for verdict in found} == expected
