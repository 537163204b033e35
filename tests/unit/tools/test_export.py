"""Errors of exporters and of the disk on which they write."""

from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.errors import SamestepError
from samestep.tools.export import PROGRAMS, _write_program


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError("could not get source code"), "E_EXPORT"),  # of `inspect`
        (ValueError("a branch depends on data"), "E_EXPORT"),
        (OSError(28, "No space left on device"), "E_OUTPUT"),
    ],
)
def test_failed_export_has_the_cause_and_leaves_no_file(
    error: Exception, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any, arguments: Any, keywords: Any, shapes: Any, out: Path) -> Any:
        out.write_bytes(b"incomplete")
        raise error

    monkeypatch.setitem(PROGRAMS, "torch", fail)
    with pytest.raises(SamestepError) as caught:
        _write_program("torch", torch.nn.Linear(2, 2), torch.zeros(2, 2), tmp_path / "model.pt2")
    assert caught.value.code == code
    assert str(error.args[-1]) in caught.value.value
    assert not list(tmp_path.iterdir())
