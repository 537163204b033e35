"""Texts with a class each, from tables in files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from samestep.errors import DataError
from samestep.recipes.splits import Splits
from samestep.recipes.task import Answer, Task
from samestep.recipes.text.rows import Row, read_rows
from samestep.recipes.text.tokenizer import Tokenizer, read_tokenizer

Sample = tuple[torch.Tensor, int]
Inputs = dict[str, torch.Tensor]


class Texts:
    """Rows as tokens and class numbers; a row that cannot be used is refused when it is asked for."""

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer, classes: Sequence[str]) -> None:
        self._rows, self._tokenizer = rows, tokenizer
        self._numbers = {name: number for number, name in enumerate(classes)}

    @property
    def lengths(self) -> list[int]:
        """How long each text is, in characters: near enough to tokens, and known without making any."""
        return [len(row.text) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        if row.problem:
            raise DataError(
                f"{row.where}: {row.problem}",
                rule="every row has a text",
                do="mend it; data.bad_samples: skip leaves it out",
            )
        return torch.tensor(self._tokenizer.framed(row.text)), self._number(row)

    def _number(self, row: Row) -> int:
        """The class of a row, which is given by name, or by number where no class is called that."""
        found = self._numbers.get(row.label)
        if found is None and row.label.isdecimal() and int(row.label) < len(self._numbers):
            found = int(row.label)
        if found is None:
            raise DataError(
                f"{row.where}: its label is {row.label!r}",
                rule=f"one of {', '.join(self._numbers)}, or a number below {len(self._numbers)}",
                do="mend it, or say data.options.classes; data.bad_samples: skip leaves it out",
            )
        return found


def load_texts(
    path: str,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.1,
    text_column: str = "text",
    label_column: str = "label",
    classes: Sequence[str | int] | None = None,
    tokenizer: str | None = None,
    longest: int = 512,
    group_by_length: bool = True,
) -> Splits:
    """Texts with labels, one a row.

    Args:
        path: a file that ends in .csv, .tsv, .jsonl or .parquet.
        evaluation_path: another one to evaluate on; else a part of `path` is kept apart, by a hash of the texts, so
            that equal texts stay together and rows added later move no other.
        evaluation_fraction: how much is kept apart.
        classes: names, in the order of their numbers; else the labels of `path`, sorted.
        tokenizer: a `tokenizers` JSON file or a folder that transformers wrote; null for bytes.
        longest: texts are cut to so many tokens, marks of their ends included.
        group_by_length: texts of like length share a global batch.

    Raises:
        DataError: a file is missing or damaged as a whole, or there is one class only.
    """
    if longest < 3 or not 0 < evaluation_fraction < 1:
        raise DataError(
            f"data.options: longest is {longest} and evaluation_fraction {evaluation_fraction}",
            rule="at least 3 tokens; a fraction between 0 and 1",
            do="longest: 512, evaluation_fraction: 0.1",
        )
    found = read_tokenizer(tokenizer, longest)
    rows = read_rows(Path(path), text_column, label_column)
    names = _classes(classes, rows, path)
    if evaluation_path is None:
        train, evaluation = _split(rows, evaluation_fraction)
    else:
        train, evaluation = rows, read_rows(Path(evaluation_path), text_column, label_column)
    trained, evaluated = Texts(train, found, names), Texts(evaluation, found, names)
    vocabulary = max(found.size, found.padding + 1)
    return Splits(
        train=trained,
        evaluation=evaluated,
        classes=names,
        collate=partial(padded_texts, padding=found.padding),
        train_lengths=trained.lengths if group_by_length else None,
        evaluation_lengths=evaluated.lengths if group_by_length else None,
        count_tokens=_count_tokens,
        model_options={"vocabulary": vocabulary, "padding": found.padding, "longest": longest},
    )


def padded_texts(samples: list[Sample], *, padding: int) -> tuple[Inputs, torch.Tensor]:
    """Texts side by side, as long as the longest; where `attention_mask` is 0 there is nothing to look at."""
    tokens = [sample[0] for sample in samples]
    inputs = pad_sequence(tokens, batch_first=True, padding_value=padding)
    mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    return {"input_ids": inputs, "attention_mask": mask}, torch.tensor([sample[1] for sample in samples])


def _count_tokens(shard: tuple[Inputs, torch.Tensor]) -> tuple[int, int]:
    mask = shard[0]["attention_mask"]
    return int(mask.sum()), mask.numel()


def text_task(classes: tuple[str, ...], *, tokenizer: str | None = None, longest: int = 512, **others: Any) -> Task:
    """Tells the class of a text; a file is one text."""
    found = read_tokenizer(tokenizer, longest)
    return Task(reads="a text file", read=partial(_read, found), tell=partial(_tell, classes))


def _read(tokenizer: Tokenizer, path: Path) -> Inputs:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", rule="text in UTF-8", do="look at the file") from error
    if not text:
        raise DataError(f"{path} is empty", rule="a text", do="write something")
    tokens = torch.tensor(tokenizer.framed(text))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _tell(classes: tuple[str, ...], outputs: torch.Tensor) -> Answer:
    probabilities = outputs.reshape(-1).double().softmax(dim=0).tolist()
    best = max(range(len(classes)), key=probabilities.__getitem__)
    return {"class": classes[best], "probabilities": dict(zip(classes, probabilities, strict=True))}


def _classes(given: Sequence[str | int] | None, rows: Sequence[Row], path: str) -> tuple[str, ...]:
    """The classes that are given, or the labels there are; numbers in the order of numbers."""
    if given is not None and any(isinstance(name, bool) for name in given):
        raise DataError(
            "data.options.classes are true and false",
            rule="YAML takes yes and no for these",
            do="quote them: ['no', 'yes']",
        )
    labels = {row.label for row in rows if row.label}
    ordered = sorted(labels, key=int) if all(label.isdecimal() for label in labels) else sorted(labels)
    names = ordered if given is None else [str(name) for name in given]
    if len(names) < 2 or len(set(names)) < len(names):
        raise DataError(
            f"{path}: the classes are {', '.join(names) or 'none'}",
            rule="at least two different classes",
            do="look at data.options.label_column, or say data.options.classes",
        )
    return tuple(names)


def _split(rows: Sequence[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """Keep the rows apart whose texts hash to less than `fraction`, and at least one text on each side."""
    places = sorted({_place(row) for row in rows})
    if len(places) < 2:
        raise DataError(
            "there is one text", rule="one to train on and one to evaluate on", do="add rows, or give evaluation_path"
        )
    bound = min(max(fraction, places[0] + 1e-16), places[-1])
    return [row for row in rows if _place(row) >= bound], [row for row in rows if _place(row) < bound]


def _place(row: Row) -> float:
    """A number in 0..1 that only the text decides."""
    return int.from_bytes(hashlib.sha256((row.text or row.where).encode()).digest()[:6]) / 2**48
