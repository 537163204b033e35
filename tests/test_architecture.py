"""The source tree keeps its rules, and each rule is shown to notice when it is broken."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.architecture import (
    BUDGET,
    FILE_LINES,
    FUNCTION_LINES,
    MODULE_RULES,
    TEST_BUDGET,
    TREE_RULES,
    Modules,
    broken_by,
    conditions_in_calls,
    device_calls,
    environment_reads,
    import_cycles,
    imports_going_up,
    joined_assignments,
    over_budget,
    over_budget_of_tests,
    oversize,
    read_modules,
    stubs,
    swallowed_exceptions,
    unannotated,
    unmarked_reads,
    unpickling,
)

Rule = Callable[..., list[str]]

SOURCE = Path(__file__).parents[1] / "src"
PUBLIC = {
    "CheckpointManager",
    "RunResult",
    "__version__",
    "all_gather",
    "epochs",
    "errors",
    "full_state_dict",
    "init",
    "is_main",
    "launch",
    "loader",
    "main_first",
    "no_sync",
    "parallel",
    "request_stop",
    "train",
}


@pytest.fixture(scope="module")
def modules() -> Modules:
    found = read_modules(SOURCE)
    assert found, f"no modules below {SOURCE}"
    return found


@pytest.mark.parametrize("rule", [*TREE_RULES, *MODULE_RULES])
def test_source_keeps(rule: Rule, modules: Modules) -> None:
    broken = broken_by(rule, modules)
    assert not broken, "\n".join(["", *broken])


def test_tests_keep_their_budget(tmp_path: Path) -> None:
    broken = over_budget_of_tests(Path(__file__).parent)
    assert not broken, "\n".join(["", *broken])
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "large.py").write_text("x = 1\n" * (TEST_BUDGET["helpers and workers"] + 1))
    assert len(over_budget_of_tests(tmp_path)) == 1


def test_public_surface_is_the_documented_one() -> None:
    import samestep  # here, so that the other tests can run while it is broken

    assert set(samestep.__all__) == PUBLIC
    assert len(samestep.__all__) == len(PUBLIC)
    missing = [name for name in PUBLIC if not hasattr(samestep, name)]
    assert not missing


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout))


def test_import_samestep_does_not_import_torch() -> None:
    loaded = loaded_by("import samestep")
    assert "samestep" in loaded
    assert "torch" not in loaded


def test_loaded_by_sees_what_a_statement_imports() -> None:
    assert "colorsys" in loaded_by("import colorsys")
    assert "colorsys" not in loaded_by("pass")


# --- the rules notice ------------------------------------------------------------------------------------


def written(root: Path, files: dict[str, str]) -> Modules:
    """The modules of a package with these files (path to source)."""
    for name, source in files.items():
        path = root / "samestep" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return read_modules(root)


LONG_FUNCTION = "def f() -> None:\n" + "    pass\n" * (FUNCTION_LINES - 1)

BROKEN: list[tuple[Rule, str, str]] = [
    (imports_going_up, "config.py", "from samestep.distributed import env"),
    (imports_going_up, "config.py", "import samestep.checkpoint_manager"),
    (imports_going_up, "config.py", "from .data import order"),
    (imports_going_up, "data/loader.py", "from ..strategies.layout import Layout"),
    (imports_going_up, "data/loader.py", "def f():\n    from samestep.checkpoint import store"),
    (imports_going_up, "data/loader.py", "if TYPE_CHECKING:\n    import samestep.view"),
    (imports_going_up, "data/loader.py", "importlib.import_module('samestep.view.core')"),
    (imports_going_up, "view/core.py", "from samestep import launch"),
    (imports_going_up, "attic.py", "x = 1"),
    (environment_reads, "launcher/worker.py", "import os\nx = os.environ['RANK']"),
    (environment_reads, "launcher/worker.py", "import os as system\nx = system.getenv('RANK')"),
    (environment_reads, "launcher/worker.py", "from os import putenv"),
    (device_calls, "view/core.py", "import torch\ntorch.cuda.synchronize()"),
    (device_calls, "view/core.py", "from torch.cuda import Stream"),
    (device_calls, "view/core.py", "from torch import cuda\ncuda.Event()"),
    (device_calls, "view/core.py", "def f(device):\n    return device.type != 'cuda'"),
    (device_calls, "view/core.py", "def f(device):\n    return 'cuda' == device.type"),
    (unmarked_reads, "view/core.py", "def f(x):\n    return x.detach().cpu().numpy()"),
    (unpickling, "data/cache.py", "import pickle"),
    (unpickling, "data/cache.py", "def f():\n    from pickle import loads"),
    (unpickling, "data/cache.py", "import torch\ntorch.load('x')"),
    (unpickling, "data/cache.py", "from torch import load as read\nread('x', weights_only=False)"),
    (unpickling, "data/cache.py", "import numpy\nnumpy.load('x', allow_pickle=True)"),
    (unpickling, "data/cache.py", "import torch.distributed as dist\ndist.all_gather_object([], 1)"),
    (unpickling, "data/cache.py", "from torch.distributed import broadcast_object_list"),
    (unpickling, "data/cache.py", "backend().gather_object(1)"),
    (swallowed_exceptions, "view/core.py", "try:\n    pass\nexcept:\n    pass"),
    (swallowed_exceptions, "view/core.py", "try:\n    pass\nexcept Exception as e:\n    print(e)"),
    (swallowed_exceptions, "view/core.py", "try:\n    pass\nexcept (OSError, BaseException):\n    pass"),
    (swallowed_exceptions, "view/core.py", "try:\n    pass\nexcept Exception:  # boundary:\n    pass"),
    (swallowed_exceptions, "view/core.py", "try:\n    pass\nexcept:\n    def f():\n        raise"),
    (
        swallowed_exceptions,
        "view/core.py",
        "from contextlib import suppress\nwith suppress(Exception): f()",
    ),
    (stubs, "view/core.py", "def f():\n    raise NotImplementedError"),
    (stubs, "view/core.py", "def f():\n    raise NotImplementedError('later')"),
    (joined_assignments, "view/core.py", "a, b = 1, 2"),
    (joined_assignments, "view/core.py", "self.a, b = 1, f()"),
    (conditions_in_calls, "view/core.py", "f(1 if x else 2)"),
    (conditions_in_calls, "view/core.py", "f(a=1 if x else 2)"),
    (over_budget, "view/core.py", "x = 1\n" * (BUDGET["lines of the core"] + 1)),
    (oversize, "view/core.py", "x = 1\n" * FILE_LINES),
    (oversize, "view/core.py", LONG_FUNCTION),
    (unannotated, "view/core.py", "def f(x) -> int: ..."),
    (unannotated, "view/core.py", "def f(x: int): ..."),
    (unannotated, "view/core.py", "def f(*args, **kwargs: int) -> int: ..."),
    (unannotated, "view/core.py", "if x:\n    async def f(*, key): ..."),
    (unannotated, "view/core.py", "class A:\n    def __init__(self, x) -> None: ..."),
    (unannotated, "view/core.py", "class A:\n    @staticmethod\n    def f(x) -> int: ..."),
]

KEPT: list[tuple[Rule, str, str]] = [
    (imports_going_up, "view/core.py", "from samestep.data.loader import Loader\nfrom . import other"),
    (imports_going_up, "__init__.py", "from samestep.cli import main"),
    (environment_reads, "distributed/env.py", "import os\nx = os.environ['RANK']"),
    (environment_reads, "launcher/worker.py", "import os\nx = os.cpu_count()"),
    (device_calls, "distributed/devices.py", "import torch\ntorch.cuda.synchronize()"),
    (device_calls, "view/core.py", "import torch\nx = torch.version.cuda"),
    (unmarked_reads, "distributed/device_reads.py", "def f(x):\n    return x.cpu()"),
    (unmarked_reads, "tools/diff.py", "def f(x):\n    return x.cpu()"),
    (unpickling, "data/cache.py", "import torch\ntorch.load('x', weights_only=True)"),
    (unpickling, "data/cache.py", "import json\njson.load(open('x'))"),
    (unpickling, "launcher/pickling.py", "import cloudpickle"),
    (swallowed_exceptions, "view/core.py", "try:\n    pass\nexcept OSError:\n    pass"),
    (swallowed_exceptions, "view/core.py", "try:\n    pass\nexcept Exception:\n    if x:\n        raise"),
    (
        swallowed_exceptions,
        "cli/main.py",
        "try:\n    pass\nexcept Exception:  # boundary: exit codes\n    pass",
    ),
    (joined_assignments, "view/core.py", "a, b = b, a + b\nc, d = f()"),
    (oversize, "view/core.py", "x = 1\n" * (FILE_LINES - 1)),
    (unannotated, "view/core.py", "def _f(x): ...\nclass _A:\n    def f(self, x): ..."),
    (unannotated, "view/_core.py", "def f(x): ..."),
    (unannotated, "view/core.py", "class A:\n    def f(self, x: int) -> int:\n        def g(y): ..."),
]


@pytest.mark.parametrize(("rule", "name", "source"), BROKEN)
def test_rule_notices(rule: Rule, name: str, source: str, tmp_path: Path) -> None:
    assert broken_by(rule, written(tmp_path, {name: source}))


@pytest.mark.parametrize(("rule", "name", "source"), KEPT)
def test_rule_allows(rule: Rule, name: str, source: str, tmp_path: Path) -> None:
    assert not broken_by(rule, written(tmp_path, {name: source}))


@pytest.mark.parametrize(
    ("package", "order", "loader", "is_cycle"),
    [
        ("", "from samestep.data import loader", "def f():\n    from .order import shuffle", True),
        ("", "from samestep.data import loader", "if TYPE_CHECKING:\n    from .order import shuffle", True),
        ("from .loader import Loader", "", "from samestep.data import order", False),
    ],
    ids=["in a function", "for type checkers", "package that gathers its modules"],
)
def test_cycles_of_imports(package: str, order: str, loader: str, is_cycle: bool, tmp_path: Path) -> None:
    files = {"data/__init__.py": package, "data/order.py": order, "data/loader.py": loader}
    assert bool(import_cycles(written(tmp_path, files))) is is_cycle


def test_every_rule_has_a_source_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BROKEN} | {import_cycles} == {*TREE_RULES, *MODULE_RULES}
