"""Whether a script imports Samestep is read from its source, and from that of its own modules."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from samestep.script.mode import Mode, imports_samestep, mode_of, uses_samestep


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder / next(iter(files))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train.py": "import torch, json"}, False),
        ({"train.py": "import samestep"}, True),
        ({"train.py": "import samestep.errors as e"}, True),
        ({"train.py": "from samestep import parallel"}, True),
        ({"train.py": "def f():\n    try:\n        import samestep\n    except ImportError:\n        pass"}, True),
        ({"train.py": "# import samestep\nprint('import samestep')"}, False),
        ({"train.py": "import samesteps"}, False),
        ({"train.py": "import helper", "helper.py": "import samestep"}, True),
        ({"train.py": "import helper", "helper.py": "import train"}, False),
        ({"train.py": "from lib.deep import x", "lib/__init__.py": "", "lib/deep.py": "import samestep"}, True),
        ({"train.py": "from lib import deep", "lib/__init__.py": "", "lib/deep.py": "import samestep"}, True),
        ({"train.py": "import lib.a", "lib/__init__.py": "", "lib/a.py": "from . import b", "lib/b.py": ""}, False),
        (
            {
                "train.py": "import lib.a",
                "lib/__init__.py": "",
                "lib/a.py": "from .b import c",
                "lib/b.py": "import samestep",
            },
            True,
        ),
        ({"train.py": "def f(:"}, False),
    ],
)
def test_imports_of_scripts(files: dict[str, str], expected: bool, tmp_path: Path) -> None:
    assert imports_samestep(written(tmp_path, files)) is expected


def test_mode_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"pkg/__init__.py": "", "pkg/__main__.py": "", "pkg/train.py": "from . import model"}
    written(tmp_path, files | {"pkg/model.py": "import samestep"})
    monkeypatch.syspath_prepend(str(tmp_path))
    modes = {
        name: mode_of(Path(name), is_module=True, own_group=False)
        for name in ("pkg", "pkg.__main__", "pkg.train", "no_such_module_at_all")
    }
    assert modes == dict.fromkeys(modes, Mode.UNCHANGED) | {"pkg.train": Mode.SAMESTEP}


@pytest.mark.parametrize(
    ("source", "own_group", "mode"),
    [
        ("import torch", False, Mode.UNCHANGED),
        ("import samestep", False, Mode.SAMESTEP),
        ("import torch", True, Mode.OWN_GROUP),
    ],
)
def test_mode_of_a_script(source: str, own_group: bool, mode: Mode, tmp_path: Path) -> None:
    script = written(tmp_path, {"train.py": source})
    assert mode_of(script, is_module=False, own_group=own_group) is mode


def of_notebook(source: str) -> Callable[..., object]:
    """Return the function `f` of cells of a notebook."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(source, names)
    function = names["f"]
    assert callable(function)
    return function


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ndef f():\n    return torch.ones(1)", False),
        ("import samestep\ndef f():\n    return samestep.init()", True),
        ("import samestep\ndef f():\n    return 1", False),
        ("def f():\n    import samestep", True),
        ("from samestep.errors import InputError\ndef f():\n    raise InputError", True),
        ("import samestep\ndef g():\n    return [samestep for _ in ()]\ndef f():\n    return g()", True),
        ("import samestep\nclass A:\n    def b(self):\n        samestep.init()\ndef f():\n    A().b()", True),
    ],
)
def test_functions_of_notebooks(source: str, expected: bool) -> None:
    assert uses_samestep(of_notebook(source)) is expected
    assert uses_samestep(partial(of_notebook(source), 1)) is expected


def test_function_of_a_module_uses_what_the_module_imports() -> None:
    assert uses_samestep(of_notebook)
    assert not uses_samestep(json.dumps)
