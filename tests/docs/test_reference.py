"""The reference contains every command, recipe key, error code and public name."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "reference" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["recipe.md", "cli.md", "errors.md", "api.md"])
def test_page_is_up_to_date(generator: ModuleType, name: str) -> None:
    page = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert page == generator.PAGES[name](), "run: python docs/reference/generate.py"


def test_every_recipe_key_has_a_description(generator: ModuleType) -> None:
    rows = [line.split(" | ") for line in generator.recipe_page().splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows if not row[-1].strip(" |")] == []


def test_decisions_are_linked_from_modules_that_exist() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    pages = {path.name for path in (ROOT / "docs/decisions").glob("*.md")} - {"index.md"}
    assert {name for name in pages if f"docs/decisions/{name}" not in source} == set()
    assert set(re.findall(r"docs/decisions/([\w-]+\.md)", source)) <= pages


def test_architecture_names_files_and_classes_that_exist() -> None:
    page = (ROOT / "docs/concepts/architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/]+\.py)`", page)) - {"tests/test_architecture.py"}
    source = ROOT / "src/samestep"
    assert len(files) > 30
    assert {name for name in files if not (source / name).is_file()} == set()
    rows = re.findall(r"^\| (`[A-Z]\w+`(?:, `[A-Z]\w+`)*) \| (`[^|]+`) \|", page, re.MULTILINE)
    assert len(rows) >= 7
    for names, places in rows:
        text = "".join((source / place).read_text(encoding="utf-8") for place in re.findall(r"`([^`]+)`", places))
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^class {name}\b", text, re.MULTILINE), name


def test_architecture_is_short() -> None:
    assert len((ROOT / "docs/concepts/architecture.md").read_text(encoding="utf-8").split()) <= 900
