"""Texts for a person and for tools: help, completion, JSON schema, and the warning about too many processes."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from samestep.cli.commands import COMMANDS, help_text, recipe_summaries
from samestep.cli.launch_options import LaunchOptions
from samestep.cli.main import main
from samestep.distributed.resources import usable_processors
from samestep.errors import EXIT_DONE, EXIT_INPUT
from samestep.recipes.overrides import recipe_schema
from samestep.recipes.recipe_files import shipped_recipes

SHIPPED = Path(__file__).parents[2] / "src" / "samestep" / "recipes" / "shipped"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == EXIT_DONE
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_samestep_alone_prints_commands_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert text == printed(capsys, "--help") == f"{help_text()}\n"
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["options", "train", "check", "speed", "look", "recipes"]
    assert re.findall(r"^  (\w+) +\w", text, re.MULTILINE) == [*COMMANDS, *shipped_recipes()]
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 60, "more than a screen"


def test_each_recipe_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    summaries = recipe_summaries()
    assert list(summaries) == list(shipped_recipes())
    assert summaries["digits"] == "Handwritten digits, 8x8 pixels"
    assert not [text for text in summaries.values() if "samestep" in text or text.endswith((".", ":"))]


@pytest.mark.parametrize("command", ["train", "resume"])
def test_help_has_the_usual_options_first(capsys: pytest.CaptureFixture[str], command: str) -> None:
    usual = printed(capsys, command, "--help")
    complete = printed(capsys, command, "--help-all")
    assert f"further options: samestep {command} --help-all" in usual
    assert "--processes" in usual
    assert "--checksum-every" not in usual
    assert "--checksum-every" in complete
    assert len(usual.splitlines()) < 60, "more than a screen"


def test_help_of_a_recipe_names_the_command_that_prints_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert "settings of images: samestep train images --print" in printed(capsys, "train", "images", "--help")


# --- JSON schema ---


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--schema"])
    assert ended.value.code == EXIT_DONE
    assert capsys.readouterr().out == recipe_schema()


def test_shipped_recipes_name_the_schema_and_are_valid() -> None:
    schema = json.loads((SHIPPED / "recipe.schema.json").read_text(encoding="utf-8"))
    assert schema == json.loads(recipe_schema())
    validator = Draft202012Validator(schema)
    validator.check_schema(schema)
    for path in SHIPPED.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert text.splitlines()[0] == "# yaml-language-server: $schema=recipe.schema.json"
        assert not list(validator.iter_errors(yaml.safe_load(text))), path


@pytest.mark.parametrize(
    "change", [{"epochs": "five"}, {"epoch": 5}, {"batch_size": 0}, {"step": {"precision": "fp8"}}, {"data": "photos"}]
)
def test_schema_refuses_invalid_recipes(change: dict[str, object]) -> None:
    raw = yaml.safe_load((SHIPPED / "digits.yaml").read_text(encoding="utf-8"))
    assert list(Draft202012Validator(json.loads(recipe_schema())).iter_errors({**raw, **change}))


def test_schema_describes_every_key() -> None:
    schema = json.loads(recipe_schema())
    for section in (schema, *schema["$defs"].values()):
        for key, value in section["properties"].items():
            assert value.get("description"), key


# --- completion ---

COMPLETIONS = {"tr": {"train"}, "train dig": {"digits"}, "train digits --strat": {"--strategy"}, "rep": {"report"}}


@pytest.mark.parametrize("typed", COMPLETIONS)
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str) -> None:
    pytest.importorskip("shtab")
    (tmp_path / "completion").write_text(printed(capsys, "--print-completion", "bash"), encoding="utf-8")
    words = ["samestep", *typed.split()]
    line = f"source completion; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_samestep"
    shell = f"shopt -s extglob; {line}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == COMPLETIONS[typed], done.stderr


@pytest.mark.parametrize("shell", ["fish", "tcsh", "zsh"])
def test_other_shells_get_a_completion(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    pytest.importorskip("shtab")
    text = printed(capsys, "--print-completion", shell)
    assert all(name in text for name in COMMANDS)


def test_unknown_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "nu"]) == EXIT_INPUT
    assert "fix:      --print-completion bash" in capsys.readouterr().err


def test_completion_without_shtab_names_the_package(tmp_path: Path) -> None:
    """In a Python without the packages of the user."""
    script = "import sys; sys.modules['shtab'] = None; from samestep.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "--print-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_INPUT
    assert "pip install shtab" in done.stderr


# --- number of processes ---


def test_many_processes_on_few_cores_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cores = usable_processors()
    monkeypatch.setattr(logging.getLogger("samestep"), "propagate", True)
    for number, is_warned in ((4 * cores, False), (32 * cores, True)):
        assert LaunchOptions(processes=str(number), device="cpu").process_range() == (number, number)
        assert (f"slower than --processes {cores}" in caplog.text) == is_warned
