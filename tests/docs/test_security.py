"""Every sentence and table row of docs/security.md names the tests that hold it; the missing ones are here."""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers.surroundings import require_bounded
from helpers.system import here
from samestep.errors import InputError, SamestepError
from samestep.recipes.recipe_files import load_recipe
from samestep.recipes.trust import remember, require_trusted
from samestep.report_text import message_of
from samestep.zoo.model_libraries import transformers_model

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/security.md"
# Begin of a sentence or row: names of its tests, none for a sentence that states no behavior of Samestep.
CLAIMS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("security_claims.yaml").read_text(encoding="utf-8")
)


def sentences(text: str) -> list[str]:
    """Return the sentences and table rows of a page, without headings."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=- |\|)", text):
        stripped = block.strip()
        if stripped.startswith("|") and set(stripped) - set("|- "):
            found.append(stripped)
        elif stripped and not stripped.startswith(("#", "|")):
            joined = " ".join(stripped.removeprefix("- ").split())
            found += re.split(r"(?<=[.:!?])\s+(?=[A-Z`(])", joined)
    return found


@cache
def functions_of(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE))


def test_each_sentence_has_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = sentences(text)
    for sentence in found:
        begins = [begin for begin in CLAIMS if sentence.startswith(begin)]
        assert len(begins) == 1, f"name the tests of this sentence in security_claims.yaml: {sentence}"
    for begin, names in CLAIMS.items():
        assert any(sentence.startswith(begin) for sentence in found), f"no longer on the page: {begin}"
        for name in names:
            file, _, function = name.partition("::")
            assert function in functions_of(file), name
    assert len(found) > 50


# --- claims without a test elsewhere ---


def recipe(folder: Path, rate: float) -> Any:
    (folder / "mine.py").write_text("from torch.nn import Linear as Net\n", encoding="utf-8")
    return load_recipe("digits", ["model.name=mine:Net", f"model.options={json.dumps({'rate': rate})}"])


def test_trust_is_in_names_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    own, other = recipe(tmp_path, 0.1), recipe(tmp_path, 0.2)
    remember(tmp_path, own)
    (tmp_path / "mine.py").write_text("raise SystemExit", encoding="utf-8")  # the source is not covered
    require_trusted(tmp_path, own, trust=False)
    with pytest.raises(InputError):
        require_trusted(tmp_path, other, trust=False)
    (tmp_path / "trust").unlink()
    with pytest.raises(InputError):
        require_trusted(tmp_path, own, trust=False)
    require_trusted(tmp_path, other, trust=other)  # the command names the recipe


@pytest.mark.slow
def test_doctor_reads_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    names = ("recipe.yaml", "environment.json", "events.jsonl", ".lock", "trust")
    for name in names:
        os.mkfifo(run / name)  # a reader would wait
    monkeypatch.chdir(tmp_path)
    assert here("doctor", "--quick", cwd=tmp_path) in (0, 3)
    assert sorted(path.name for path in run.iterdir()) == sorted(names)


class Trap:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("ending", [".pth", ".pt"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_pickle_in_a_file_of_weights_is_refused(
    ending: str, is_zip: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"a{ending}"
    torch.save({"weight": Trap(tmp_path / "sprung")}, path, _use_new_zipfile_serialization=is_zip)
    assert here("eval", "digits", "--pretrained", path, cwd=tmp_path) == 2
    require_bounded(capfd.readouterr().err)
    assert not (tmp_path / "sprung").exists()


def test_code_of_a_folder_of_transformers_is_not_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'sprung')!r})\n", encoding="utf-8")
    names = {"AutoConfig": "code.Config", "AutoModelForImageClassification": "code.Model"}
    config = {"model_type": "mine", "auto_map": names, "architectures": ["Model"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(SamestepError):
        transformers_model(str(tmp_path))(num_classes=2)
    assert not (tmp_path / "sprung").exists()


def test_middle_of_a_huge_text_is_left_out() -> None:
    text = message_of(ValueError("b" + "x" * 3_000_000 + "e"))
    assert len(text) < 1_000_100
    assert (text[0], text[-1]) == ("b", "e")
    assert message_of(ValueError("x" * 1_000_000)) == "x" * 1_000_000
