"""Errors of exporters."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from samestep.errors import InputError
from samestep.recipes.recipe_files import DatasetInfo, load_recipe
from samestep.tools import export


def test_failed_export_has_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError("could not get source code\nof the model")  # of `inspect`

    monkeypatch.setattr(export, "start", lambda **options: nullcontext())
    monkeypatch.setattr(export, "trained_model", lambda *arguments: nn.Linear(2, 2))
    monkeypatch.setattr(export, "_write", fail)
    with pytest.raises(InputError) as caught:
        export.export(load_recipe("digits"), DatasetInfo([]), tmp_path, "onnx", tmp_path / "model.onnx", None)
    assert caught.value.code == "E_EXPORT"
    assert caught.value.value.endswith("could not get source code")
