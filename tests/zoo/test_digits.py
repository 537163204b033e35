"""Digits of scikit-learn in a fixed split."""

import torch

from samestep.zoo.digits import DigitImages, DigitsNet, load_digits


def table(images: DigitImages) -> set[tuple[float, ...]]:
    return {(*images[i][0].flatten().tolist(), images[i][1]) for i in range(len(images))}


def test_both_splits_together_are_the_images_of_scikit_learn() -> None:
    from sklearn import datasets  # slow to import

    pixels, labels = datasets.load_digits(return_X_y=True)
    splits = load_digits(shift=0)
    expected = {(*(row / 16).tolist(), int(label)) for row, label in zip(pixels, labels, strict=True)}
    assert (len(splits.train), len(splits.evaluation)) == (1437, 360)
    assert table(splits.train) | table(splits.evaluation) == expected  # type: ignore[arg-type]
    assert table(load_digits(shift=0).evaluation) == table(splits.evaluation)  # type: ignore[arg-type]
    held_out = [splits.evaluation[index][1] for index in range(360)]
    assert min(held_out.count(digit) for digit in range(10)) >= 20


def test_shift_is_at_most_the_option() -> None:
    plain, moved = load_digits(shift=0).train, load_digits(shift=1).train
    for index in range(20):
        image, shifted = plain[index][0], moved[index][0]
        padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
        assert any(
            torch.equal(shifted, padded[:, top : top + 8, left : left + 8]) for top in range(3) for left in range(3)
        )


def test_net_returns_one_row_of_logits_per_image() -> None:
    assert DigitsNet(num_classes=7, width=4)(torch.zeros(3, 1, 8, 8)).shape == (3, 7)
