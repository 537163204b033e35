"""Models of torchvision, timm and transformers by name, without downloads, and their weights."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.image_kinds import encoded, noise
from samestep.errors import DataError, InputError
from samestep.launcher.launch import RankError, launch
from samestep.recipes.builder import MODELS, find
from samestep.recipes.models import load_matching
from samestep.recipes.recipe_files import make_recipe
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.options import call
from workers import images as ranks_images

VIT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 16,
    "patch_size": 8,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("models must not be downloaded")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def built(name: str, **options: Any) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: torch.nn.Module = call(find(name, MODELS, "model"), {"num_classes": 3, **options}, where="model.options")
    return model.eval()


@pytest.fixture
def vit_folder(tmp_path: Path) -> str:
    make_torchvision_importable()
    from transformers import ViTConfig

    ViTConfig(**VIT, num_labels=7, dtype="float16").save_pretrained(tmp_path / "vit")
    return f"{tmp_path}/vit"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("squeezenet1_1", {}),
        ("torchvision:mobilenet_v3_small", {"dropout": 0.1}),
        ("timm:resnet10t", {"drop_rate": 0.1}),
        ("timm:resnet10t.c3_in1k", {}),
        ("transformers:ViTForImageClassification", VIT),
        ("transformers:ViTForImageClassification", {**VIT, "attn_implementation": "eager"}),
    ],
)
def test_models_return_logits(name: str, options: dict[str, Any]) -> None:
    logits = built(name, **options)(torch.zeros(2, 3, options.get("image_size", 32), options.get("image_size", 32)))
    assert (type(logits), logits.shape, logits.dtype) == (torch.Tensor, (2, 3), torch.float32)


def test_folder_of_transformers_defines_architecture_and_names(vit_folder: str, tmp_path: Path) -> None:
    model = built(f"transformers:{vit_folder}")
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 3)
    source = built(f"transformers:{vit_folder}", num_classes=7)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    notes = load_matching(model, tmp_path / "model.safetensors")
    assert [line.split(":")[0] for line in notes[1:]] == ["  left out classifier.weight", "  left out classifier.bias"]
    assert {"vit.embeddings.cls_token", "classifier.bias"} < set(model.state_dict())


def test_segmentation_models_download_no_backbone() -> None:
    assert "out" in built("torchvision:lraspp_mobilenet_v3_large")(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet43", {}, "did you mean resnet34?"),
        ("torchvision:resnet43", {}, "did you mean torchvision:resnet34?"),
        ("timm:resnet43", {}, "did you mean timm:resnet34?"),
        ("timm:hf-hub:some/model", {}, "timm has no model 'hf-hub:some/model'"),
        ("transformers:ViTForImageClasification", {}, "did you mean transformers:ViTForImageClassification?"),
        ("transformers:google/vit-base-patch16-224", {}, "models are not downloaded"),
        ("resnet18", {"weights": "DEFAULT"}, "model.options.weights is 'DEFAULT'"),
        ("fcn_resnet50", {"weights_backbone": "DEFAULT"}, "model.options.weights_backbone is 'DEFAULT'"),
        ("timm:resnet10t", {"pretrained": True}, "model.options.pretrained is True"),
        ("resnet18", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("timm:resnet10t", {"depht": 3}, "unexpected keyword argument 'depht'"),
        ("transformers:ViTForImageClassification", {"hidden_sise": 3}, "did you mean model.options.hidden_size?"),
    ],
)
def test_unknown_models_and_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        built(name, **options)
    assert message in str(error.value)


def test_invalid_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}), encoding="utf-8")
    with pytest.raises(InputError, match="no-such-type"):
        built(f"transformers:{tmp_path}")


# --- weights on several ranks ----------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    for name in ("one", "two"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "images" / name / f"{number}.png").write_bytes(encoded(noise(8), "PNG"))
    return {
        "data": {"name": "images", "options": {"path": str(tmp_path / "images"), "image_size": 16}},
        "model": {"name": "transformers:ViTForImageClassification", "options": VIT},
        "optimizer": {"name": "sgd", "options": {"lr": 0.1}},
        "batch_size": 4,
        "microbatches": 4,
        "epochs": 1,
    }


def with_weights(recipe: dict[str, Any], file: Path) -> Any:
    return make_recipe({**recipe, "model": {**recipe["model"], "pretrained": str(file)}}, (), origin="a test")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of weights for seven classes, with the prefixes of DDP and Lightning."""
    paths = []
    for number in range(2):
        state = built("transformers:ViTForImageClassification", **{**VIT, "num_classes": 7}).state_dict()
        nested = {"epoch": 3, "state_dict": {f"model.module.{name}": tensor + number for name, tensor in state.items()}}
        torch.save(nested, tmp_path / f"{number}.ckpt")
        paths.append(tmp_path / f"{number}.ckpt")
    return paths


@pytest.mark.slow
def test_rank_with_another_file_is_reported(recipe: dict[str, Any], files: list[Path], monkeypatch: Any) -> None:
    monkeypatch.undo()
    recipes = [with_weights(recipe, files[number]) for number in (0, 0, 1)]
    with pytest.raises((DataError, RankError), match="rank 2 read other weights than the rest"):
        launch(ranks_images.built_from_own_files, recipes, processes=3)


# --- wrapped weights -------------------------------------------------------------------


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3))


@pytest.mark.parametrize("prefixes", [("module.",), ("_orig_mod.",), ("model.",), ("module.", "_orig_mod."), ()])
@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", None])
def test_keys_and_prefixes_are_removed(prefixes: tuple[str, ...], key: str | None, tmp_path: Path) -> None:
    source, model = net(), net()
    state = {"".join(prefixes) + name: tensor for name, tensor in source.state_dict().items()}
    torch.save({key: state, "optimizer": {"lr": 0.1}} if key else state, tmp_path / "a.pt")
    notes = load_matching(model, tmp_path / "a.pt")
    assert notes[-1] == "pretrained: 2 tensors taken, 0 left out"
    assert len(notes[:-1]) == len(prefixes) + (key is not None)
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    state = net().state_dict()
    torch.save({**state, "model.0.weight": state["0.weight"]}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"both model\.0\.weight and 0\.weight"):
        load_matching(net(), tmp_path / "a.pt")


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {"a": 1}}, {"a": 1, "b": torch.zeros(1)}])
def test_file_without_plain_weights_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DataError, match="contains no plain weights"):
        load_matching(net(), tmp_path / "a.pt")
