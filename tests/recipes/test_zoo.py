"""Models of libraries by name: logits of as many classes as the data has, and nothing fetched."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ranks_images
from image_kinds import encoded, noise
from samestep.errors import DataError, RecipeError
from samestep.recipes.names import MODELS, call, find
from samestep.recipes.parse import make_recipe
from samestep.recipes.weights.start import take_matching
from samestep.runtime.launch import RankError, launch
from samestep.runtime.vision import make_torchvision_importable

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
        raise AssertionError("a model must not be fetched")

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
def test_models_give_logits_of_the_classes(name: str, options: dict[str, Any]) -> None:
    logits = built(name, **options)(torch.zeros(2, 3, options.get("image_size", 32), options.get("image_size", 32)))
    assert (type(logits), logits.shape, logits.dtype) == (torch.Tensor, (2, 3), torch.float32)


def test_folder_of_transformers_gives_its_architecture_and_names(vit_folder: str, tmp_path: Path) -> None:
    model = built(f"transformers:{vit_folder}")
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 3)
    given = built(f"transformers:{vit_folder}", num_classes=7)
    save_file(given.state_dict(), tmp_path / "model.safetensors")
    matched = take_matching(model, tmp_path / "model.safetensors")
    assert [line.split(":")[0] for line in matched.left_out] == ["classifier.weight", "classifier.bias"]
    assert {"vit.embeddings.cls_token", "classifier.bias"} < set(model.state_dict())


def test_segmentation_models_fetch_no_backbone() -> None:
    assert "out" in built("torchvision:lraspp_mobilenet_v3_large")(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet43", {}, "did you mean resnet34?"),
        ("torchvision:resnet43", {}, "did you mean torchvision:resnet34?"),
        ("timm:resnet43", {}, "did you mean timm:resnet34?"),
        ("timm:hf-hub:somebody/model", {}, "timm has no model 'hf-hub:somebody/model'"),
        ("transformers:ViTForImageClasification", {}, "did you mean transformers:ViTForImageClassification?"),
        ("transformers:google/vit-base-patch16-224", {}, "nothing is downloaded"),
        ("resnet18", {"weights": "DEFAULT"}, "model.options.weights is 'DEFAULT'"),
        ("fcn_resnet50", {"weights_backbone": "DEFAULT"}, "model.options.weights_backbone is 'DEFAULT'"),
        ("timm:resnet10t", {"pretrained": True}, "model.options.pretrained is True"),
        ("resnet18", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("timm:resnet10t", {"depht": 3}, "unexpected keyword argument 'depht'"),
        ("transformers:ViTForImageClassification", {"hidden_sise": 3}, "did you mean model.options.hidden_size?"),
    ],
)
def test_models_and_options_that_are_not_there_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        built(name, **options)
    assert said in str(error.value)


def test_config_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}), encoding="utf-8")
    with pytest.raises(RecipeError, match="no-such-type"):
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
        "shards": 4,
        "epochs": 1,
    }


def with_weights(recipe: dict[str, Any], file: Path) -> Any:
    return make_recipe({**recipe, "model": {**recipe["model"], "pretrained": str(file)}}, (), origin="a test")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Weights with a head of seven classes as DDP and Lightning would leave them; and others."""
    found = []
    for number in range(2):
        state = built("transformers:ViTForImageClassification", **{**VIT, "num_classes": 7}).state_dict()
        nested = {"epoch": 3, "state_dict": {f"model.module.{name}": tensor + number for name, tensor in state.items()}}
        torch.save(nested, tmp_path / f"{number}.ckpt")
        found.append(tmp_path / f"{number}.ckpt")
    return found


def test_all_ranks_begin_with_the_same_bits(recipe: dict[str, Any], files: list[Path], monkeypatch: Any) -> None:
    monkeypatch.undo()  # ranks meet by sockets
    given = with_weights(recipe, files[0])
    (alone,) = launch(ranks_images.built, given, processes=1)
    assert launch(ranks_images.built, given, processes=3) == [alone] * 3
    plain = make_recipe(recipe, (), origin="a test")
    assert launch(ranks_images.built, plain, processes=1)[0][0] != alone[0]
    assert alone[1][:3] == (
        "pretrained: weights under 'state_dict'; not looked at: epoch",
        "pretrained: 'model.' taken off 24 names",
        "pretrained: 'module.' taken off 24 names",
    )
    assert alone[1][3:] == (
        "pretrained: 22 tensors taken, 2 left out",
        "  left out classifier.weight: (2, 16) here, (7, 16) in the file",
        "  left out classifier.bias: (2,) here, (7,) in the file",
    )


@pytest.mark.slow
def test_rank_that_reads_another_file_is_named(recipe: dict[str, Any], files: list[Path], monkeypatch: Any) -> None:
    monkeypatch.undo()
    recipes = [with_weights(recipe, files[number]) for number in (0, 0, 1)]
    with pytest.raises((DataError, RankError), match="rank 2 read other weights than the rest"):
        launch(ranks_images.built_from_own_files, recipes, processes=3)


# --- what trainers wrap around weights -------------------------------------------------------------------


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3))


@pytest.mark.parametrize("prefixes", [("module.",), ("_orig_mod.",), ("model.",), ("module.", "_orig_mod."), ()])
@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", None])
def test_wrapped_weights_are_the_plain_ones(prefixes: tuple[str, ...], key: str | None, tmp_path: Path) -> None:
    given, model = net(), net()
    state = {"".join(prefixes) + name: tensor for name, tensor in given.state_dict().items()}
    torch.save({key: state, "optimizer": {"lr": 0.1}} if key else state, tmp_path / "a.pt")
    matched = take_matching(model, tmp_path / "a.pt")
    assert len(matched.taken) == 2
    assert not matched.left_out
    assert len(matched.taken_off) == len(prefixes) + (key is not None)
    assert all(torch.equal(tensor, given.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_prefix_that_is_the_models_own_stays(tmp_path: Path) -> None:
    given, model = (torch.nn.ModuleDict({"model": net()}) for _ in range(2))
    torch.save(given.state_dict(), tmp_path / "a.pt")
    assert take_matching(model, tmp_path / "a.pt").taken_off == ()


def test_two_tensors_for_one_name_are_refused(tmp_path: Path) -> None:
    state = net().state_dict()
    torch.save({**state, "model.0.weight": state["0.weight"]}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"both model\.0\.weight and 0\.weight"):
        take_matching(net(), tmp_path / "a.pt")


@pytest.mark.parametrize("found", [[1, 2], {"state_dict": {"a": 1}}, {"a": 1, "b": torch.zeros(1)}])
def test_file_without_plain_weights_is_refused(found: Any, tmp_path: Path) -> None:
    torch.save(found, tmp_path / "a.pt")
    with pytest.raises(DataError, match="holds no plain weights"):
        take_matching(net(), tmp_path / "a.pt")
