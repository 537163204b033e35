"""Classification of texts from tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from samestep.zoo.data_files import fingerprint_of
from samestep.zoo.image_files import file_errors
from samestep.zoo.labels import ClassLabels, Row, class_names, read_table
from samestep.zoo.options import require_count, unusable
from samestep.zoo.splits import Splits, Task, top_classes
from samestep.zoo.tokenizers import Tokenizer, as_tokens, read_tokenizer
from samestep.zoo.validation_split import require_fraction, train_validation_split

Sample = tuple[torch.Tensor, int]
Inputs = dict[str, torch.Tensor]


class Texts:
    """Texts as tokens and class numbers. An unusable row raises its error on access."""

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer, classes: Sequence[str]) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._labels = ClassLabels(classes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        if row.problem:
            expected = "a text and a label in every row"
            raise unusable(f"{row.where}: {row.problem}", expected, "correct the row", "E_CLASSES")
        number = self._labels.number(row.label, row.where)
        return as_tokens(self._tokenizer.encode_framed(row.text), row.where), number


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
    # At least one token of the text between two special tokens.
    require_count("longest", longest, 3, 512)
    encoder = read_tokenizer(tokenizer, longest)
    read = partial(
        read_table, text_column=text_column, label_column=label_column, option="text_column"
    )
    rows = read(path)
    if classes is None:
        labels = {row.label for row in rows if row.label}
        classes = sorted(labels)
        if all(label.isdecimal() for label in labels):
            classes = sorted(labels, key=int)  # 10 comes after 9
    names = class_names(classes)
    if evaluation_path is None:
        # Rows without a text would all have the same key.
        keys = [row.text or row.where for row in rows]
        parts = train_validation_split(keys, evaluation_fraction, unit="text")
        train_rows, validation_rows = ([rows[index] for index in indices] for indices in parts)
    else:
        train_rows = rows
        validation_rows = read(evaluation_path)
    lengths: list[list[int] | None] = [None, None]
    if group_by_length:
        # In characters, an estimate of the number of tokens.
        lengths = [[len(row.text) for row in part] for part in (train_rows, validation_rows)]
    # A tokenizer without a padding token has a number after its own for padding.
    vocabulary = max(encoder.size, encoder.padding + 1)
    return Splits(
        train=Texts(train_rows, encoder, names),
        evaluation=Texts(validation_rows, encoder, names),
        classes=names,
        collate=partial(collate_texts, padding=encoder.padding),
        train_lengths=lengths[0],
        evaluation_lengths=lengths[1],
        fingerprint=fingerprint_of([row.text for row in train_rows]),
        model_options={"vocabulary": vocabulary, "padding": encoder.padding, "longest": longest},
        evaluation_text=lambda index: validation_rows[index].text,
    )


def text_task(
    classes: tuple[str, ...], *, tokenizer: str | None = None, longest: int = 512
) -> Task:
    """Return the task that classifies the text of a file."""
    encoder = read_tokenizer(tokenizer, longest)

    def read(path: Path) -> Inputs:
        with file_errors(path, "text in UTF-8"):
            # A file ends with a line break, and the texts of a table do not.
            text = path.read_text(encoding="utf-8").strip()
        framed = encoder.encode_framed(text) if text else []
        tokens = as_tokens(framed, path)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    describe = partial(top_classes, classes=classes, count=len(classes))
    return Task(reads="a text file", read=read, describe=describe)


def collate_texts(samples: list[Sample], *, padding: int) -> tuple[Inputs, torch.Tensor]:
    """Return texts padded to the longest one, their attention mask and their class numbers."""
    tokens = [sample[0] for sample in samples]
    inputs = pad_sequence(tokens, batch_first=True, padding_value=padding)
    mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    numbers = torch.tensor([sample[1] for sample in samples])
    return {"input_ids": inputs, "attention_mask": mask}, numbers
