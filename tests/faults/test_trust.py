"""Code that a run directory names runs only if the user trusts it; `top` and `report` import nothing."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from helpers.surroundings import RecordFault, require_bounded
from helpers.system import here, samestep
from samestep.config import Recipe
from samestep.errors import InputError
from samestep.recipes.recipe_files import load_recipe
from samestep.recipes.trust import foreign_paths, remember, require_trusted

RECIPE = Path(__file__).parents[1] / "helpers/recorded.yaml"
PLANTED = "from pathlib import Path\nPath({marker!r}).touch()\nfrom torch.nn import Linear as Net\n"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """File that exists once a planted module was imported."""
    return tmp_path / "imported"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of this account with its own components."""
    path = tmp_path_factory.mktemp("trained")
    assert here("train", RECIPE, "--name", "a", "epochs=1", cwd=path) == 0
    return path / "runs/a"


def plant(folder: Path, marker: Path, *names: str) -> None:
    """Write modules with these names, which create the marker when they are imported."""
    for name in names:
        (folder / f"{name}.py").write_text(PLANTED.format(marker=str(marker)), encoding="utf-8")


def copy_run(source: Path, folder: Path, **names: str) -> Path:
    """Copy a run directory, and change names of components."""
    shutil.copytree(source, folder, symlinks=True)
    data = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    for section, name in names.items():
        data[section]["name"] = name
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    return folder


def recipe_with(section: str, name: str) -> Recipe:
    """Return the recipe of digits with another name of a component."""
    return load_recipe("digits", [f"{section}.name={json.dumps(name)}"])


def test_code_of_a_run_directory_is_refused(
    trained: Path, tmp_path: Path, marker: Path, capfd: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    plant(tmp_path, marker, "planted")
    run = copy_run(trained, tmp_path / "runs/a", model="planted:Net")
    (tmp_path / "x.png").touch()
    for command in (("resume", run), ("eval", run), ("predict", run, "x.png"), ("export", run)):
        assert here(*command, cwd=tmp_path) == 2
        _, report = capfd.readouterr()
        require_bounded(report)
        assert "[E_UNTRUSTED]" in report.splitlines()[0]
        assert "planted:Net" in report
        assert not marker.exists(), command
    record_fault("a run directory of a stranger names a module of the current folder", "exit code 2")


DANGEROUS = {
    "model": [
        *("os:system", "builtins:exec", "torch:load", "torch.hub:load", "torch.utils.cpp_extension:load"),
        *("samestep.launcher.pickling:unpack", "samestep.zoo.options:call", "timm:hf-hub:owner/name"),
        *(
            "timm:local-dir:/tmp",
            "transformers:./folder",
            "transformers:pipeline",
            "torch.nn:_Module",
            ":",
            "os:",
            "torch.nn:",
            "Torch.nn:Linear",
        ),
        *("torch.nn.functional:linear", "evil.torch.nn:Linear"),
    ],
    "data": ["timm:create_model", "torch.nn:Linear", "samestep.zoo.digits:load_digits"],
    "loss": ["numpy:load", "torch:compile", "os.path:exists", "torch.nn.functional:_verify_batch_size"],
    "optimizer": ["torch.optim.lr_scheduler:_warn", "my_optimizers:Adam", "torch.nn:Linear"],
}
WELL_KNOWN = {
    "model": [
        *("digits_net", "resnet18", "torchvision:resnet18", "timm:vit_tiny_patch16_224", "timm:resnet10t.c3_in1k"),
        *("transformers:ViTForImageClassification", "torch.nn:Linear"),
    ],
    "data": ["digits"],
    "loss": ["cross_entropy", "torch.nn:CrossEntropyLoss", "torch.nn.functional:cross_entropy"],
    "optimizer": ["adamw", "torch.optim:SGD"],
}


@pytest.mark.parametrize(("section", "name"), [(section, name) for section in DANGEROUS for name in DANGEROUS[section]])
def test_functions_that_run_code_are_foreign(section: str, name: str) -> None:
    assert foreign_paths(recipe_with(section, name)) == {section: name}


@pytest.mark.parametrize(
    ("section", "name"), [(section, name) for section in WELL_KNOWN for name in WELL_KNOWN[section]]
)
def test_components_of_well_known_libraries_need_no_trust(section: str, name: str) -> None:
    assert not foreign_paths(recipe_with(section, name))


OPENING: dict[str, tuple[str, dict[str, object]]] = {
    "an encoder of the Hub": ("unet", {"encoder": "tu-hf-hub:owner/name"}),
    "pretrained weights": ("timm:resnet10t", {"pretrained": True}),
    "attention code of the Hub": ("transformers:ViTForImageClassification", {"attn_implementation": "owner/name"}),
    "an address": ("unet_small", {"pretrained_url": "https://example.org/x"}),
    "an import path as an option": ("torch.nn:Linear", {"device": "os:system"}),
    "a file in a list": ("resnet18", {"block_args": [{"name": "/etc/passwd"}]}),
}


@pytest.mark.parametrize("opens", OPENING)
def test_options_that_open_something_are_foreign(opens: str, record_fault: RecordFault) -> None:
    name, options = OPENING[opens]
    recipe = load_recipe("digits", [f"model.name={json.dumps(name)}", f"model.options={json.dumps(options)}"])
    assert foreign_paths(recipe).keys() == {"model"}
    record_fault(f"a run of a stranger names {opens}: {name}", "exit code 2")


def test_trust_is_that_of_all_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    given, other = (
        load_recipe("digits", ["model.name='timm:resnet10t'", f"model.options={{pretrained: true, file: '{file}'}}"])
        for file in ("mine", "theirs")
    )
    with pytest.raises(InputError) as error:
        require_trusted(tmp_path, other, trust=given)
    assert error.value.code == "E_UNTRUSTED"
    require_trusted(tmp_path, other, trust=other)


def test_plain_options_need_no_trust() -> None:
    options = {"dropout": 0.1, "pretrained": False, "sizes": [1, 2], "nested": {"a": None}}
    assert not foreign_paths(load_recipe("digits", [f"model.options={json.dumps(options)}"]))


@pytest.mark.parametrize("fault", ["a folder that others can write", "a link to a folder", "a token that is a FIFO"])
def test_only_a_private_folder_remembers(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_fault: RecordFault
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    recipe = recipe_with("model", "os:system")
    folder = tmp_path / "state/samestep"
    before = os.umask(0)
    try:
        remember(tmp_path, recipe)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    require_trusted(tmp_path, recipe, trust=False)
    if "write" in fault:
        folder.chmod(0o702)
    elif "link" in fault:
        folder.rename(tmp_path / "other")
        folder.symlink_to(tmp_path / "other")
    else:
        (tmp_path / "trust").unlink()
        os.mkfifo(tmp_path / "trust")
    for trust in (False, True, "FIFO" in fault):  # a new token replaces the FIFO
        with nullcontext() if trust else pytest.raises(InputError) as caught:
            require_trusted(tmp_path, recipe, trust=trust)
        assert caught is None or caught.value.code == "E_UNTRUSTED"
    record_fault(
        f"trusted components are remembered in {fault}", "exit code 2, then 0" if "FIFO" in fault else "exit code 2"
    )


def test_module_of_the_current_folder_is_not_a_library(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, record_fault: RecordFault
) -> None:
    plant(tmp_path, marker, "timm", "torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), ""])
    for name in ("timm:resnet10t", "torch.nn:Linear"):
        assert foreign_paths(recipe_with("model", name)) == {"model": name}
    assert not marker.exists()
    record_fault("a folder has a module with the name of a library that is not installed", "exit code 2")


@pytest.mark.slow
def test_own_runs_need_no_option_and_those_of_others_do(
    trained: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    record_fault: RecordFault,
) -> None:
    run = copy_run(trained, tmp_path / "moved")
    assert here("eval", run, "--json", cwd=tmp_path) == 0
    replaced = copy_run(run, tmp_path / "replaced", data="helpers.recorded:load_broken")
    assert here("eval", replaced, cwd=tmp_path) == 2
    record_fault("the recipe of a trusted run is replaced", "exit code 2")
    other = copy_run(run, tmp_path / "other")
    (other / "trust").write_text("0" * 64, encoding="ascii")
    assert here("eval", other, cwd=tmp_path) == 2
    record_fault("another run with the components of a trusted one", "exit code 2")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # as another account
    assert here("eval", run, cwd=tmp_path) == 2
    capfd.readouterr()
    assert here("eval", run, "--trust", "--json", cwd=tmp_path) == 0
    assert here("eval", run, "--json", cwd=tmp_path) == 0, "trusted once"
    record_fault("a run of another account", "exit code 2, then 0")


def test_viewers_import_nothing_of_a_run(
    trained: Path, tmp_path: Path, marker: Path, record_fault: RecordFault
) -> None:
    run = copy_run(trained, tmp_path / "runs/a", model="planted:Net", loss="os:system", data="random:Random")
    names = ("planted", "random", "logging", "token", "rich", "yaml", "numpy", "psutil", "torch")
    plant(tmp_path, marker, *names)
    plant(run, marker, *names)
    for command in (("top", "runs/a", "--once"), ("report", "runs/a")):
        done = samestep(*command, cwd=tmp_path)
        assert done.code == 0, done.err
        assert not marker.exists(), command
    record_fault("`top` and `report` show a run directory with planted modules", "exit code 0")
