"""Recipes of ViT, with weights of timm and PaddleViT."""

from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers.paddle_files import CLASSES, DEPTH, HEADS, PATCH, SIZE, WIDTH, save_state, vit_forward, vit_state
from helpers.system import answer, events, here, state_of, weights
from samestep.recipes.builder import build_model
from samestep.recipes.recipe_files import load_recipe
from samestep.zoo.images import load_images

VITS = ("vit_base_patch16_224", "vit_tiny_patch16_224")
# A ViT of some thousand parameters on pictures of 8 pixels.
TINY = (
    "data.options.path=pictures",
    f"data.options.image_size={SIZE}",
    f"model.options.img_size={SIZE}",
    f"model.options.patch_size={PATCH}",
    f"model.options.embed_dim={WIDTH}",
    f"model.options.depth={DEPTH}",
    f"model.options.num_heads={HEADS}",
    "batch_size=10",
    "microbatches=5",
    "epochs=2",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write images of five classes with different colors."""
    folder = tmp_path_factory.mktemp("vit")
    draw = numpy.random.default_rng(0)
    for number in range(CLASSES):
        (folder / "pictures" / f"class{number}").mkdir(parents=True)
        colour = draw.integers(40, 200, 3)
        for index in range(8):
            pixels = numpy.clip(draw.normal(colour, 30, (20, 24, 3)), 0, 255).astype("uint8")
            Image.fromarray(pixels).save(folder / "pictures" / f"class{number}" / f"{index}.png")
    return folder


def evaluated(place: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, float]:
    capsys.readouterr()
    assert here("eval", *arguments, "--json", cwd=place) == 0
    values: dict[str, float] = answer(capsys)
    return values


@pytest.mark.parametrize("name", VITS)
def test_recipes_build_the_models(name: str) -> None:
    recipe = load_recipe(name, TINY[:-1])
    model, _ = build_model(recipe, [str(number) for number in range(CLASSES)], {})
    assert type(model).__name__ == "VisionTransformer"
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}["head.weight"] == (CLASSES, WIDTH)
    assert (recipe.optimizer.name, recipe.optimizer.decay_norms, recipe.schedule.name) == ("adamw", False, "cosine")
    assert recipe.ema is not None
    assert recipe.schedule.warmup_epochs > 0
    assert recipe.step.clip_norm is not None
    assert recipe.loss.options["label_smoothing"] > 0


@pytest.mark.long
@pytest.mark.slow
def test_one_and_three_processes_train_equal_weights_and_runs_resume(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ("model.options.drop_path_rate=0.2", "model.options.proj_drop_rate=0.1", "schedule.warmup_epochs=0.5")
    for count in (1, 3):
        arguments = ("vit_base_patch16_224", "--processes", count, "--name", f"ranks{count}", *TINY, *more)
        assert here("train", *arguments, cwd=place) == 0
    assert "Warning" not in capfd.readouterr().err
    runs = place / "runs"
    assert weights(runs / "ranks1") == weights(runs / "ranks3")
    assert (runs / "ranks1" / "checkpoints" / "last" / "average.safetensors").is_file()
    notes = [event["text"] for event in events(runs / "ranks1", "note")]
    assert notes == [
        "learning rate 1.95313e-05 = 0.0005 x 10/256 (linear)",
        "layer decay 0.65: 4 learning rates from 5.36e-06 to 1.95e-05",
    ]
    assert state_of(runs / "ranks3")["cursor"] == {"epoch": 2, "samples": 0}
    assert here("resume", runs / "ranks3", "--processes", 2, cwd=place) == 0


@pytest.mark.long
@pytest.mark.slow
def test_file_of_weights_is_evaluated_like_a_checkpoint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (*TINY, "ema=null", "epochs=1")
    assert here("train", "vit_tiny_patch16_224", "--name", "plain", *overrides, cwd=place) == 0
    of_run = evaluated(place, capsys, "runs/plain", "--checkpoint", "last")
    file = place / "runs" / "plain" / "checkpoints" / "last" / "model.safetensors"
    torch.save(load_file(file), place / "plain.pth")
    for weights_file, count in ((file, 3), ("plain.pth", 1)):
        arguments = ("vit_tiny_patch16_224", "--pretrained", weights_file, "--processes", count, *overrides)
        of_file = evaluated(place, capsys, *arguments)
        assert {name: of_file[name] for name in ("loss", "accuracy", "samples")} == {
            name: of_run[name] for name in ("loss", "accuracy", "samples")
        }


def test_loss_of_paddle_weights_equals_the_reference(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference is a NumPy implementation."""
    state = vit_state(4)
    narrow = {name: array.astype(numpy.float32) for name, array in state.items()}
    save_state(place / "vit.pdparams", narrow)
    recipe = load_recipe("vit_tiny_patch16_224", TINY)
    options = {**recipe.data.options, "path": str(place / "pictures")}
    splits = load_images(**options)
    pairs = [splits.evaluation[index] for index in range(len(splits.evaluation))]
    images = numpy.stack([image.double().numpy() for image, _ in pairs])
    logits = torch.from_numpy(vit_forward(state, images))
    targets = torch.tensor([target for _, target in pairs])
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    values = evaluated(place, capsys, "vit_tiny_patch16_224", "--pretrained", "vit.pdparams", *TINY)
    assert values["samples"] == len(pairs)
    assert values["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert values["accuracy"] == pytest.approx(float((logits.argmax(dim=1) == targets).double().mean()))


@pytest.mark.slow
def test_converted_recipe_and_weights_are_trained(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_state(place / "start.pdparams", {name: array.astype("float32") for name, array in vit_state(5).items()})
    sizes = f"{{PATCH_SIZE: {PATCH}, EMBED_DIM: {WIDTH}, DEPTH: {DEPTH}, NUM_HEADS: {HEADS}}}"
    text = f"DATA: {{IMAGE_SIZE: {SIZE}, BATCH_SIZE: 2}}\nMODEL: {{TRANS: {sizes}, PRETRAINED: ./start}}\n"
    (place / "paddle.yaml").write_text(f"{text}TRAIN: {{NUM_EPOCHS: 1, ACCUM_ITER: 1}}\n", encoding="utf-8")
    assert here("convert", "paddle.yaml", "--devices-meant", 4, "--out", "converted.yaml", cwd=place) == 0
    assert here("train", "converted.yaml", "--name", "conv", "data.options.path=pictures", cwd=place) == 0
    notes = [event["text"] for event in events(place / "runs" / "conv", "note")]
    assert f"pretrained: {len(vit_state())} tensors taken, 0 left out" in notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs/plain", "batch_size=5"), "batch_size=5 with a run"),
        (
            ("vit_tiny_patch16_224", "--pretrained", "a.pth", "--checkpoint", "last"),
            "--checkpoint with --pretrained",
        ),
    ],
)
def test_options_that_exclude_each_other(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    capsys.readouterr()
    assert here("eval", *arguments, cwd=place) == 2
    assert message in capsys.readouterr().err


def test_incomplete_weights_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = build_model(load_recipe("vit_tiny_patch16_224", TINY), ["a"] * CLASSES, {})
    save_file(model.state_dict(), place / "whole.safetensors")
    arguments = ("vit_tiny_patch16_224", "--pretrained", "whole.safetensors", *TINY, "model.options.num_classes=7")
    capsys.readouterr()
    assert here("eval", *arguments, cwd=place) == 2
    assert "2 of another shape (head.weight: (7, 12) here, (5, 12) in the file" in capsys.readouterr().err
