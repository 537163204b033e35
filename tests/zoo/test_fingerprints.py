"""Facts of training data that a resumption compares."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from samestep.zoo.images import load_image_list, load_images
from samestep.zoo.language import load_language
from samestep.zoo.segmentation import load_segmentation
from samestep.zoo.splits import Splits
from samestep.zoo.texts import load_texts


def images(root: Path, change: bool) -> Splits:
    for name in ("lemon", "lime"):
        (root / name).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (8, 8)).save(root / name / f"{number}.png")
    if change:
        (root / "lemon" / "0.png").rename(root / "lemon" / "new.png")
    return load_images(str(root))


def image_list(root: Path, change: bool) -> Splits:
    rows = [f"{'new' if change and number == 4 else number}.png,{number % 2}" for number in range(16)]
    root.mkdir()
    (root / "list.csv").write_text("\n".join(["path,label", *rows]), encoding="utf-8")
    return load_image_list(str(root / "list.csv"))


def segmentation(root: Path, change: bool) -> Splits:
    for number in range(16):
        for kind in ("images", "masks"):
            (root / kind).mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8)).save(root / kind / f"{'new' if change and number == 4 else number}.png")
    return load_segmentation(str(root))


def texts(root: Path, change: bool) -> Splits:
    rows = [f"{'new' if change and number == 4 else 'old'} {number},{number % 2}" for number in range(16)]
    root.mkdir()
    (root / "rows.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    return load_texts(str(root / "rows.csv"))


def language(root: Path, change: bool) -> Splits:
    root.mkdir()
    (root / "a.txt").write_text(("other" if change else "words") * 100, encoding="utf-8")
    return load_language(str(root / "a.txt"), cache=str(root / "cache"))


@pytest.mark.parametrize("load", [images, image_list, segmentation, texts, language])
def test_a_changed_sample_changes_the_facts_alone(tmp_path: Path, load: Callable[[Path, bool], Splits]) -> None:
    root = tmp_path / "data"
    before = load(root, False)
    root.rename(tmp_path / "before")
    again = load(root, False)
    root.rename(tmp_path / "again")
    after = load(root, True)
    assert before.facts == again.facts
    assert before.facts["classes"] == after.facts["classes"]
    assert before.facts["fingerprint"] != after.facts["fingerprint"]


def test_the_facts_of_many_classes_are_short() -> None:
    def facts(*names: str) -> str:
        return Splits(train=[], evaluation=[], classes=names).facts["classes"]

    many = [str(number) for number in range(1000)]
    assert facts("a", "b").startswith("a, b (2 in all, hash ")
    assert facts("a", "b") != facts("b", "a")
    assert facts("caf\udce9", "b").startswith("caf\\udce9, b (")
    assert facts("a, b") != facts("a", "b")
    assert facts(*many) != facts(*many[:-1], "other")
    assert len(facts(*many)) < 100
