"""Classification of texts from tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from samestep.data.streams.source import fingerprint_of
from samestep.errors import DataError
from samestep.zoo.options import require_count, require_option
from samestep.zoo.splits import (
    Answer,
    ClassLabels,
    Splits,
    Task,
    label_text,
    require_fraction,
    require_no_booleans,
    top_classes,
    train_validation_split,
)
from samestep.zoo.tables import Row, read_table, require_columns
from samestep.zoo.text.tokenizer import Tokenizer, as_tokens, read_tokenizer

Sample = tuple[torch.Tensor, int]
Inputs = dict[str, torch.Tensor]
_FIX = "correct the row, or skip such rows: data.bad_samples: skip"


class LabeledText(NamedTuple):
    """Text and label of one row."""

    where: str  # file and line, for errors
    text: str
    label: str  # label as text; empty if missing
    problem: str = ""  # reason why the row cannot be used; empty for valid rows


class Texts:
    """Texts as tokens and class numbers. An unusable row raises its error on access."""

    def __init__(self, rows: Sequence[LabeledText], tokenizer: Tokenizer, classes: Sequence[str]) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._labels = ClassLabels(classes)

    @property
    def lengths(self) -> list[int]:
        """Length of each text in characters, an estimate of the number of tokens."""
        return [len(row.text) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        if row.problem:
            raise DataError(f"{row.where}: {row.problem}", expected="a text in every row", fix=_FIX, code="E_CLASSES")
        tokens = as_tokens(self._tokenizer.encode_framed(row.text), row.where, _FIX)
        number = self._labels.number(row.label)
        if number is None:
            raise DataError(
                f"{row.where}: the label {row.label!r} is not a class",
                expected=self._labels.expected,
                fix=_FIX,
                code="E_CLASSES",
            )
        return tokens, number


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
    """Return the texts of a table, with the options of `docs/guides/text.md`.

    Raises:
        InputError: a file is missing or damaged, or an option is invalid.
    """
    require_fraction(evaluation_fraction)
    require_count("longest", longest, 3, 512)
    is_list = classes is None or isinstance(classes, list | tuple)
    require_option("classes", classes, is_list, "a list of class names, or null", "[bad, good]")
    encoder = read_tokenizer(tokenizer, longest)
    rows = read_texts(Path(path), text_column, label_column)
    names = _classes(classes, rows, path)
    if evaluation_path is None:
        keys = [row.text or row.where for row in rows]
        parts = train_validation_split(keys, evaluation_fraction, unit="text")
        train_rows, validation_rows = ([rows[index] for index in indices] for indices in parts)
    else:
        train_rows = rows
        validation_rows = read_texts(Path(evaluation_path), text_column, label_column)
    train = Texts(train_rows, encoder, names)
    validation = Texts(validation_rows, encoder, names)
    vocabulary = max(encoder.size, encoder.padding + 1)
    return Splits(
        train=train,
        evaluation=validation,
        classes=names,
        collate=partial(collate_texts, padding=encoder.padding),
        train_lengths=train.lengths if group_by_length else None,
        evaluation_lengths=validation.lengths if group_by_length else None,
        count_tokens=_count_tokens,
        fingerprint=fingerprint_of([row.text for row in train_rows], []),
        model_options={"vocabulary": vocabulary, "padding": encoder.padding, "longest": longest},
    )


def text_task(classes: tuple[str, ...], *, tokenizer: str | None = None, longest: int = 512) -> Task:
    """Return the task that classifies the text of a file."""
    encoder = read_tokenizer(tokenizer, longest)

    def read(path: Path) -> Inputs:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} cannot be read: {error}",
                expected="text in UTF-8",
                fix="convert the file, or choose another one",
                code="E_UNREADABLE",
            ) from error
        tokens = as_tokens(encoder.encode_framed(text) if text else [], path, "choose another file")
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def describe(outputs: torch.Tensor) -> Answer:
        return top_classes(outputs, classes, count=len(classes))

    return Task(reads="a text file", read=read, describe=describe)


def read_texts(path: Path, text_column: str, label_column: str) -> list[LabeledText]:
    """Return the texts and labels of a table; unusable rows have a problem.

    Raises:
        DataError: the table is missing, empty or damaged, or has no such column.
    """
    rows = read_table(path)
    require_columns(rows, path, {"text_column": text_column, "label_column": label_column})
    return [_labeled_text(row, text_column, label_column) for row in rows]


def collate_texts(samples: list[Sample], *, padding: int) -> tuple[Inputs, torch.Tensor]:
    """Return texts padded to the longest one, their attention mask and their class numbers."""
    tokens = [sample[0] for sample in samples]
    inputs = pad_sequence(tokens, batch_first=True, padding_value=padding)
    mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    return {"input_ids": inputs, "attention_mask": mask}, torch.tensor([sample[1] for sample in samples])


def _count_tokens(microbatch: tuple[Inputs, torch.Tensor]) -> tuple[int, int]:
    mask = microbatch[0]["attention_mask"]
    return int(mask.sum()), mask.numel()


def _labeled_text(row: Row, text_column: str, label_column: str) -> LabeledText:
    text = row.values.get(text_column)
    label = label_text(row.values.get(label_column))
    if row.problem:
        return LabeledText(row.where, "", "", row.problem)
    if not isinstance(text, str) or not text.strip():
        return LabeledText(row.where, "", label, f"the text is {text!r}")
    return LabeledText(row.where, text, label)


def _classes(classes: Sequence[str | int] | None, rows: Sequence[LabeledText], path: str) -> tuple[str, ...]:
    """Return `classes`, or the sorted labels of the rows; numbers are sorted as numbers."""
    require_no_booleans(classes or ())
    labels = {row.label for row in rows if row.label}
    if classes is not None:
        names = [str(name) for name in classes]
    elif all(label.isdecimal() for label in labels):
        names = sorted(labels, key=int)
    else:
        names = sorted(labels)
    if len(names) < 2 or len(set(names)) < len(names):
        raise DataError(
            f"{path}: the classes are {', '.join(names) or '(none)'}",
            expected="at least two different classes",
            fix="correct data.options.label_column, or set data.options.classes",
            code="E_CLASSES",
        )
    return tuple(names)
