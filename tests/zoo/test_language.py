"""Next-token prediction: tokens of documents, blocks, splits, GPT models and text generation."""

import hashlib
import math
import os
import re
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from helpers.system import events, here, weights
from samestep.checkpoint.state import load_model
from samestep.config import ModelConfig
from samestep.errors import EXIT_DONE, DataError, InputError, RecipeError
from samestep.recipes.recipe_files import load_recipe
from samestep.zoo.language import (
    ALPHABET,
    Blocks,
    cached_tokens,
    collate_padded,
    encode_lines,
    generate,
    language_task,
    load_language,
    load_tokens,
    make_lines,
    next_tokens,
    read_document,
)
from samestep.zoo.models import GPT, TokensNet, gpt2
from samestep.zoo.options import call
from samestep.zoo.tokenizers import ByteTokenizer, read_tokenizer

END = 256


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def blocks_of(tokens: list[int], block_size: int) -> Blocks:
    return Blocks(numpy.array(tokens, dtype="<u2"), block_size)


def tokens_of(blocks: Any) -> list[int]:
    """Return all tokens of the blocks."""
    first = int(blocks[0][0][0])
    return [first, *(int(token) for index in range(len(blocks)) for token in blocks[index][1])]


# --- packing ----------------------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6))
def test_end_token_follows_each_document(tmp_path: Path, contents: list[bytes]) -> None:
    files = write(tmp_path, {f"{number}.txt": content for number, content in enumerate(contents)})
    documents = [read_document(files / f"{number}.txt", f"{number}.txt") for number in range(len(contents))]
    row = cached_tokens(documents, ByteTokenizer(), tmp_path / "cache")
    assert row.tolist() == [token for content in contents if content for token in [*content, END]]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 60_000), min_size=2, max_size=200), st.integers(1, 70))
def test_every_token_but_the_first_is_a_target_once(tokens: list[int], block_size: int) -> None:
    blocks = blocks_of(tokens, block_size)
    assert tokens_of(blocks) == tokens
    for index in range(len(blocks)):
        inputs, targets = blocks[index]
        assert inputs[1:].tolist() == targets[:-1].tolist()
        assert len(inputs) == (block_size if index < len(blocks) - 1 else len(tokens) - 1 - index * block_size)


def test_files_of_a_folder(tmp_path: Path) -> None:
    """The suffix has any case, the names any encoding; files of linked folders belong to the folder."""
    other = write(tmp_path / "other", {"d.txt": b"dd"})
    files = {"a.txt": b"aa", "b.TXT": b"bb", os.fsdecode(b"c\xe9.txt"): b"cc", ".hidden.txt": b"ee", "f.md": b"ff"}
    folder = write(tmp_path / "texts", files)
    (folder / "link").symlink_to(other)
    splits = load_language(str(folder), evaluation_fraction=0.4, cache=str(tmp_path / "cache"))
    tokens = [*tokens_of(splits.train), *tokens_of(splits.evaluation)]
    assert sorted(tokens) == sorted([*b"aabbccdd", *4 * [END]])


def test_cache_is_written_once_and_again_for_changed_text(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, {"a.txt": b"abc"}) / "a.txt", "a.txt")
    cache = tmp_path / "cache"
    cached_tokens([document], ByteTokenizer(), cache)
    [file] = cache.iterdir()
    time = file.stat().st_mtime_ns
    cached_tokens([document], ByteTokenizer(), cache)
    assert file.stat().st_mtime_ns == time
    changed = read_document(write(tmp_path, {"a.txt": b"abd"}) / "a.txt", "a.txt")
    assert cached_tokens([changed], ByteTokenizer(), cache).tolist() == [*b"abd", END]
    assert cached_tokens([document], ByteTokenizer(), cache).tolist() == [*b"abc", END]  # from the cache
    assert len(list(cache.iterdir())) == 2


# --- text -------------------------------------------------------------------------------------------------


def load(folder: Path, **options: Any) -> Any:
    return load_language(str(folder), cache=str(folder.parent / "cache"), **options)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    files = {f"{number:02}/{number}.txt": f"text {number} ".encode() * 30 for number in range(40)}
    return write(tmp_path / "many", {**files, "empty.txt": b"", "left.out": b"no"})


def test_split_by_files_is_stable_when_files_are_added(many: Path) -> None:
    before = load(many)
    row = bytes(token for token in tokens_of(before.evaluation) if token != END)
    names = {word for word in row.split() if word != b"text"}
    assert 1 <= len(names) < 15
    assert not names & set(bytes(token for token in tokens_of(before.train) if token != END).split())
    write(many, {f"more/{number}.txt": b"more" for number in range(9)})
    after = bytes(token for token in tokens_of(load(many).evaluation) if token != END)
    assert after.replace(b"more", b"") == row


def test_one_file_is_split_at_its_end(tmp_path: Path) -> None:
    text = write(tmp_path, {"a.txt": bytes(range(200))}) / "a.txt"
    splits = load_language(str(text), cache=str(tmp_path / "cache"), evaluation_fraction=0.25, block_size=7)
    assert tokens_of(splits.train) == list(range(151))
    assert tokens_of(splits.evaluation) == [*range(151, 200), END]
    limited = load_language(
        str(text), cache=str(tmp_path / "cache"), train_tokens=50, evaluation_tokens=3, block_size=7
    )
    assert tokens_of(limited.train) == list(range(51))
    assert len(tokens_of(limited.evaluation)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluation_fraction": 1.0}, r"data\.options\.evaluation_fraction is 1\.0"),
        ({"block_size": 0}, r"data\.options\.block_size is 0"),
        ({"suffixes": [".md"]}, r"has no files that end in \.md"),
        ({"evaluation_tokens": -5}, r"data\.options\.evaluation_tokens is -5"),
        ({"suffixes": ".md"}, r"data\.options\.suffixes is '\.md'"),
        ({"tokenizer": "nowhere.json"}, r"no tokenizer can be read from nowhere\.json"),
    ],
)
def test_invalid_options_are_refused(many: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(many, **options)


def test_default_text_is_the_standard_library(tmp_path: Path) -> None:
    splits = load_language(cache=str(tmp_path), train_tokens=2000, evaluation_tokens=500)
    assert (len(tokens_of(splits.train)), len(tokens_of(splits.evaluation))) == (2001, 501)
    beginning = bytes(token for token in tokens_of(splits.train) if token != END)[:300]
    root = Path(sysconfig.get_path("stdlib"))
    assert any(beginning[:150] in file.read_bytes() for file in root.rglob("*.py"))
    assert (len(splits.classes), len(set(splits.classes))) == (257, 257)


# --- tokenizers of files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small byte-level BPE tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the text of the tests " * 5, "another text"], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@settings(max_examples=60)
@given(text=st.text())
def test_decode_inverts_encode(tokenizer_file: Path, text: str) -> None:
    for tokenizer in (read_tokenizer(str(tokenizer_file)), ByteTokenizer()):
        tokens = tokenizer.encode(text.encode())
        assert all(0 <= token < tokenizer.size for token in tokens)
        if "<|endoftext|>" not in text:
            assert tokenizer.decode(tokens) == text


def test_binary_file_is_refused_by_a_tokenizer_of_a_file(tmp_path: Path, tokenizer_file: Path) -> None:
    folder = write(tmp_path / "texts", {"good.txt": b"good" * 20, "bad.txt": b"bad \xff" * 20})
    with pytest.raises(DataError, match=r"bad\.txt is not text: invalid start byte at byte 4"):
        load(folder, tokenizer=str(tokenizer_file))
    assert len(load(folder).classes) == 257  # the byte tokenizer accepts any content


# --- models -----------------------------------------------------------------------------------------------


def tiny(**options: Any) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(**{"n_embd": 16, "n_head": 2, "n_layer": 2, "block_size": 12, **options})


def test_gpt2_has_124_million_parameters() -> None:
    with torch.device("meta"):
        model = gpt2()
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert load_recipe("language_gpt2").model == ModelConfig(name="gpt2", options={"dropout": 0.0})


def net() -> TokensNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TokensNet(width=16, heads=2)


@pytest.mark.parametrize(("make", "classes"), [(tiny, 257), (partial(tiny, fused=True), 257), (net, len(ALPHABET))])
def test_attention_is_causal(make: Callable[[], torch.nn.Module], classes: int) -> None:
    model = make().eval()
    tokens = torch.randint(0, classes, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 7:] = 0
    with torch.no_grad():
        logits, others, cut = model(tokens), model(changed), model(tokens[:, :7])
    assert logits.shape == (2, classes, 12)
    assert torch.equal(logits[..., :7], others[..., :7])
    assert not torch.equal(logits[..., 7:], others[..., 7:])
    torch.testing.assert_close(logits[..., :7], cut)


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    functional.cross_entropy(model(tokens), tokens).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_fused_attention_is_close_and_deterministic() -> None:
    tokens = torch.randint(0, 257, (3, 12), generator=torch.Generator().manual_seed(0))
    written, fused = tiny(), tiny(fused=True)
    for one, other in zip(gradients(written, tokens), gradients(fused, tokens), strict=True):
        torch.testing.assert_close(one, other)
    first, *others = (gradients(fused, tokens) for _ in range(4))
    for other in others:
        assert all(torch.equal(one, again) for one, again in zip(first, other, strict=True))


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 3 heads"):
        tiny(n_head=3)
    with pytest.raises(InputError, match=r"13 tokens and model\.options\.block_size is 12"):
        tiny()(torch.zeros(1, 13, dtype=torch.int64))


# --- generation --------------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    """Model whose most probable token is the last one plus 1, then plus 2."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.parameter, self.block_size = torch.nn.Parameter(torch.zeros(1)), block_size

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= self.block_size
        logits = torch.full((*tokens.shape, 10), -30.0)
        logits.scatter_(2, ((tokens + 1) % 10)[..., None], 5.0)
        logits.scatter_(2, ((tokens + 2) % 10)[..., None], 4.0)
        return logits.transpose(1, 2)


def test_generation_is_repeatable_and_stops_at_the_end_token() -> None:
    before = torch.get_rng_state()
    drawn = [generate(Counting(3), [0], 30, block_size=3) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert torch.equal(torch.get_rng_state(), before)
    steps = [(after - first) % 10 for first, after in zip([0, *drawn[0]], drawn[0], strict=False)]
    assert set(steps) == {1, 2}
    end = drawn[0][3]
    assert generate(Counting(3), [0], 30, block_size=3, end=end) == drawn[0][: drawn[0].index(end)]


def test_task_completes_a_prompt_and_predicts_the_next_tokens(tmp_path: Path) -> None:
    task = language_task((), block_size=12)
    assert task.complete is not None
    model = tiny()
    texts = {task.complete(model, "begin", 5) for _ in range(2)}
    assert len(texts) == 1
    assert isinstance(task.complete(model, "", 3), str)
    (tmp_path / "a.txt").write_text("some text that is long")
    inputs = task.read(tmp_path / "a.txt")
    assert bytes(inputs.tolist()) == b"that is long"
    answer = task.describe(model.eval()(inputs[None]))["next"]
    assert len(answer) == 5
    assert 0 < sum(token["probability"] for token in answer) < 1
    logits = torch.full((3, 2), 0.0)
    logits[1, 1] = 100.0
    assert next_tokens(ByteTokenizer(), logits)["next"][0] == {"token": "0x01", "probability": 1.0}
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="gives no tokens"):
        task.read(tmp_path / "a.txt")


# --- training ---------------------------------------------------------------------------------------------

TINY = (
    "data.options.train_tokens=1500",
    "data.options.evaluation_tokens=333",
    "data.options.block_size=16",
    "model.options.n_embd=16",
    "model.options.n_head=2",
    "model.options.n_layer=1",
    "model.options.dropout=0.1",
    "batch_size=8",
)


def train(place: Path, processes: int, *overrides: str, name: str) -> dict[str, Any]:
    sets = [*TINY, *overrides]
    assert here("train", "language", "--processes", processes, "--name", name, *sets, cwd=place) == EXIT_DONE
    [event] = events(place / "runs" / name, "evaluation")
    return {"weights": weights(place / "runs" / name), "loss": event["loss"], "perplexity": event["perplexity"]}


@pytest.mark.slow
def test_perplexity_covers_all_tokens_and_does_not_depend_on_processes(tmp_path: Path) -> None:
    one, three = (train(tmp_path, processes, name=f"on-{processes}") for processes in (1, 3))
    assert three == one
    splits = load_language(train_tokens=1500, evaluation_tokens=333, block_size=16, cache=str(tmp_path / "cache"))
    model = tiny(n_embd=16, n_head=2, n_layer=1, block_size=64)
    load_model(tmp_path / "runs" / "on-3" / "checkpoints" / "last", model)
    assert len(splits.evaluation) == 21
    inputs, targets = collate_padded([splits.evaluation[index] for index in range(21)])
    with torch.no_grad():
        logits = model.eval()(inputs).double().movedim(1, 2).numpy()
    counted = targets.numpy() != -100
    shifted = logits - logits.max(axis=2, keepdims=True)
    logs = shifted - numpy.log(numpy.exp(shifted).sum(axis=2, keepdims=True))
    losses = -numpy.take_along_axis(logs, numpy.maximum(targets.numpy(), 0)[..., None], axis=2)[..., 0][counted]
    assert len(losses) == 333
    assert one["perplexity"] == math.exp(one["loss"])
    assert one["perplexity"] == pytest.approx(numpy.exp(losses.mean()), rel=1e-6)


def texts(lines: list[Any]) -> list[str]:
    """Return the lines as text: the inputs and the last target."""
    return ["".join(ALPHABET[token] for token in [*inputs, targets[-1]]) for inputs, targets in lines]


def test_lines_are_equal_on_every_machine() -> None:
    digest = hashlib.sha256("\n".join(make_lines(1000)).encode()).hexdigest()
    assert digest == "17a58796139b9de7633b60c8eb979cd288a48ac244ba26fad31edd07ac680ebc"


def test_lines_are_different_and_of_many_lengths() -> None:
    lines = make_lines(1000)
    assert len(set(lines)) == 1000
    assert (min(map(len, lines)), max(map(len, lines))) == (21, 71)
    assert all(re.fullmatch(r"[a-z]+( [a-z]+){4,12}\.", line) for line in lines)


def test_every_fifth_line_is_for_validation() -> None:
    splits = load_tokens(lines=100)
    assert (len(splits.train), len(splits.evaluation), "".join(splits.classes)) == (80, 20, ALPHABET)
    assert isinstance(splits.train, list)
    assert isinstance(splits.evaluation, list)
    train, validation = texts(splits.train), texts(splits.evaluation)
    assert sorted([*train, *validation]) == sorted(f"\n{line}\n" for line in make_lines(100))
    assert validation[1] == f"\n{make_lines(6)[5]}\n"


def test_padding_targets_are_ignored() -> None:
    inputs, targets = collate_padded(encode_lines(["ab", "abcd"]))
    a, b, c, d = (ALPHABET.index(letter) for letter in "abcd")
    assert inputs.tolist() == [[0, a, b, 0, 0], [0, a, b, c, d]]
    assert targets.tolist() == [[a, b, 0, -100, -100], [a, b, c, d, 0]]


@pytest.mark.parametrize("options", [{"heads": 7}, {"heads": 0}, {"dropout": "x"}])
def test_options_with_which_no_model_can_be_built_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        call(TokensNet, options, where="model.options")
    assert caught.value.code == "E_VALUE"
