"""Text in a row of tokens, blocks of it, models that guess the next token, and what they go on with."""

import math
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from samestep.checkpoint.state import load_model
from samestep.config import ModelPart
from samestep.errors import EXIT_DONE, DataError, InputError, RecipeError
from samestep.recipes.names import MODELS, find
from samestep.recipes.parse import load_recipe
from samestep.recipes.text.generation import generate, next_tokens
from samestep.recipes.text.gpt import GPT, gpt2
from samestep.recipes.text.language import Blocks, language_task, load_language
from samestep.recipes.text.packed import packed_tokens, read_document
from samestep.recipes.text.tokenizer import Bytes, read_tokenizer
from samestep.recipes.text.tokens import padded
from system import events, here, weights

END = 256


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def blocks_of(tokens: list[int], context: int) -> Blocks:
    return Blocks(numpy.array(tokens, dtype="<u2"), context)


def row_of(blocks: Any) -> list[int]:
    """The tokens behind blocks, each once."""
    first = int(blocks[0][0][0])
    return [first, *(int(token) for index in range(len(blocks)) for token in blocks[index][1])]


# --- packing ----------------------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6))
def test_documents_stand_in_a_row_with_an_end_after_each(tmp_path: Path, contents: list[bytes]) -> None:
    files = write(tmp_path, {f"{number}.txt": content for number, content in enumerate(contents)})
    documents = [read_document(files / f"{number}.txt", f"{number}.txt") for number in range(len(contents))]
    row = packed_tokens(documents, Bytes(), tmp_path / "cache")
    assert row.tolist() == [token for content in contents if content for token in [*content, END]]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 60_000), min_size=2, max_size=200), st.integers(1, 70))
def test_every_token_but_the_first_is_a_target_once(tokens: list[int], context: int) -> None:
    blocks = blocks_of(tokens, context)
    assert row_of(blocks) == tokens
    for index in range(len(blocks)):
        inputs, targets = blocks[index]
        assert inputs[1:].tolist() == targets[:-1].tolist()
        assert len(inputs) == (context if index < len(blocks) - 1 else len(tokens) - 1 - index * context)


def test_the_file_is_made_once_and_again_when_text_changes(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, {"a.txt": b"abc"}) / "a.txt", "a.txt")
    cache = tmp_path / "cache"
    packed_tokens([document], Bytes(), cache)
    [made] = cache.iterdir()
    time = made.stat().st_mtime_ns
    packed_tokens([document], Bytes(), cache)
    assert made.stat().st_mtime_ns == time
    changed = read_document(write(tmp_path, {"a.txt": b"abd"}) / "a.txt", "a.txt")
    assert packed_tokens([changed], Bytes(), cache).tolist() == [*b"abd", END]
    assert packed_tokens([document], Bytes(), cache).tolist() == [*b"abc", END]  # nothing is read again
    assert len(list(cache.iterdir())) == 2


def test_many_may_make_the_file_at_the_same_time(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, {"a.txt": b"xyz" * 20_000}) / "a.txt", "a.txt")
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda _: packed_tokens([document], Bytes(), tmp_path / "cache"), range(16)))
    assert {row.tobytes() for row in rows} == {numpy.array([*b"xyz" * 20_000, END], dtype="<u2").tobytes()}
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing is left aside


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, {"a.txt": b"abc"}) / "a.txt", "a.txt")
    with pytest.raises(DataError, match="cannot be written"):
        packed_tokens([document], Bytes(), tmp_path / "a.txt" / "cache")


# --- text -------------------------------------------------------------------------------------------------


def load(folder: Path, **options: Any) -> Any:
    return load_language(str(folder), cache=str(folder.parent / "cache"), **options)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    files = {f"{number:02}/{number}.txt": f"text {number} ".encode() * 30 for number in range(40)}
    return write(tmp_path / "many", {**files, "empty.txt": b"", "left.out": b"no"})


def test_whole_files_are_kept_apart_and_those_added_move_no_other(many: Path) -> None:
    before = load(many)
    row = bytes(token for token in row_of(before.evaluation) if token != END)
    names = {word for word in row.split() if word != b"text"}
    assert 1 <= len(names) < 15
    assert not names & set(bytes(token for token in row_of(before.train) if token != END).split())
    write(many, {f"more/{number}.txt": b"more" for number in range(9)})
    after = bytes(token for token in row_of(load(many).evaluation) if token != END)
    assert after.replace(b"more", b"") == row


def test_of_one_file_the_tail_is_kept_apart(tmp_path: Path) -> None:
    text = write(tmp_path, {"a.txt": bytes(range(200))}) / "a.txt"
    splits = load_language(str(text), cache=str(tmp_path / "cache"), evaluation_fraction=0.25, context=7)
    assert row_of(splits.train) == list(range(151))
    assert row_of(splits.evaluation) == [*range(151, 200), END]
    limited = load_language(str(text), cache=str(tmp_path / "cache"), train_tokens=50, evaluation_tokens=3, context=7)
    assert row_of(limited.train) == list(range(51))
    assert len(row_of(limited.evaluation)) == 4


def test_other_text_can_be_named_to_evaluate_on(many: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"b.txt": b"other"})
    splits = load(many, evaluation_path=str(other))
    assert row_of(splits.evaluation) == [*b"other", END]
    assert len(row_of(splits.train)) == sum(len(file.read_bytes()) + 1 for file in many.rglob("[0-9]*.txt"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluation_fraction": 1.0}, r"data\.options: evaluation_fraction is 1\.0"),
        ({"split": "random"}, r"data\.options: split is 'random'"),
        ({"context": 0}, r"data\.options: context is 0"),
        ({"suffixes": [".md"]}, r"has no files that end in \.md"),
        ({"train_tokens": 0}, r"train has 1 tokens"),
        ({"tokenizer": "nowhere.json"}, r"no tokenizer can be read from nowhere\.json"),
    ],
)
def test_what_cannot_be_is_refused(many: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(many, **options)


def test_text_that_is_not_there_or_cannot_be_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file or folder"):
        load(tmp_path / "none")
    with pytest.raises(DataError, match="there is one file and split is files"):
        load(write(tmp_path / "one", {"a.txt": b"abc"}), split="files")


def test_the_library_of_this_python_is_there_without_a_path(tmp_path: Path) -> None:
    splits = load_language(cache=str(tmp_path), train_tokens=2000, evaluation_tokens=500)
    [note] = splits.notes
    assert "2,000 train, 500 evaluation" in note
    assert "hash " in note
    beginning = bytes(token for token in row_of(splits.train) if token != END)[:300]
    root = Path(sysconfig.get_path("stdlib"))
    assert any(beginning[:150] in file.read_bytes() for file in root.rglob("*.py"))
    assert (len(splits.classes), len(set(splits.classes))) == (257, 257)


# --- tokenizers of files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE, as GPT-2's."""
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
def test_text_comes_back_from_tokens(tokenizer_file: Path, text: str) -> None:
    for tokenizer in (read_tokenizer(str(tokenizer_file)), Bytes()):
        tokens = tokenizer.encode(text.encode())
        assert all(0 <= token < tokenizer.size for token in tokens)
        if "<|endoftext|>" not in text:
            assert tokenizer.decode(tokens) == text


def test_a_tokenizer_of_a_file_packs(many: Path, tokenizer_file: Path) -> None:
    splits = load(many, tokenizer=str(tokenizer_file))
    found = read_tokenizer(str(tokenizer_file))
    assert len(splits.classes) == found.size < 400
    assert found.end == splits.classes.index("<|endoftext|>")
    assert "text 1" in found.decode(row_of(splits.train) + row_of(splits.evaluation))
    assert len(row_of(splits.train)) < len(row_of(load(many).train))


def test_a_file_that_is_no_text_is_named_by_a_tokenizer_of_a_file(tmp_path: Path, tokenizer_file: Path) -> None:
    folder = write(tmp_path / "texts", {"good.txt": b"good" * 20, "bad.txt": b"bad \xff" * 20})
    with pytest.raises(DataError, match=r"bad\.txt is not text: invalid start byte at byte 4"):
        load(folder, tokenizer=str(tokenizer_file))
    assert len(load(folder, split="tail").classes) == 257  # bytes are bytes


def test_tokens_beyond_two_bytes_are_kept_in_four(tmp_path: Path) -> None:
    class Wide(Bytes):
        def __init__(self) -> None:
            super().__init__()
            self.size, self.end, self.digest = 70_000, 69_999, "wide"

    document = read_document(write(tmp_path, {"a.txt": b"ab"}) / "a.txt", "a.txt")
    row = packed_tokens([document], Wide(), tmp_path)
    assert (row.tolist(), row.dtype.itemsize) == ([97, 98, 69_999], 4)


# --- models -----------------------------------------------------------------------------------------------


def tiny(**options: Any) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(**{"width": 16, "heads": 2, "blocks": 2, "context": 12, **options})


def test_gpt2_has_its_124_million_parameters() -> None:
    with torch.device("meta"):
        model = gpt2()
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert load_recipe("language_gpt2").model == ModelPart(name="gpt2", options={"dropout": 0.0})


def test_initial_weights_are_those_of_gpt2() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(width=128, blocks=8)
    block = model.blocks[3]
    for layer, std in ((block.mixed, 0.02), (block.widened, 0.02), (block.joined, 0.005), (block.narrowed, 0.005)):
        assert float(layer.weight.detach().std()) == pytest.approx(std, rel=0.03)
        assert not layer.bias.any()
    assert float(model.tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("fused", [False, True])
def test_no_place_looks_ahead(fused: bool) -> None:
    model = tiny(fused=fused).eval()
    tokens = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 7:] = 0
    with torch.no_grad():
        logits, others = model(tokens), model(changed)
    assert logits.shape == (2, 257, 12)
    assert torch.equal(logits[..., :7], others[..., :7])
    assert not torch.equal(logits[..., 7:], others[..., 7:])


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    functional.cross_entropy(model(tokens), tokens).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_fused_attention_is_attention_and_comes_out_the_same_each_time() -> None:
    tokens = torch.randint(0, 257, (3, 12), generator=torch.Generator().manual_seed(0))
    written, fused = tiny(), tiny(fused=True)
    for one, other in zip(gradients(written, tokens), gradients(fused, tokens), strict=True):
        torch.testing.assert_close(one, other)
    first, *others = (gradients(fused, tokens) for _ in range(4))
    for other in others:
        assert all(torch.equal(one, again) for one, again in zip(first, other, strict=True))


def test_it_computes_what_the_gpt2_of_transformers_does() -> None:
    with torch.random.fork_rng():
        ours, theirs = tiny(dropout=0.0), find("transformers:gpt2", MODELS, "model")(257, 16, 2, 2, 12, 0.0)
    given: dict[str, torch.Tensor] = {"wte.weight": ours.tokens.weight, "wpe.weight": ours.positions.weight}
    given |= {f"ln_f.{name}": value for name, value in ours.norm.state_dict().items()}
    layers = {"attention_norm": "ln_1", "layers_norm": "ln_2", "mixed": "attn.c_attn", "joined": "attn.c_proj"}
    layers |= {"widened": "mlp.c_fc", "narrowed": "mlp.c_proj"}
    for number, block in enumerate(ours.blocks):
        for name, value in block.state_dict().items():
            layer, _, kind = name.partition(".")
            turned = value.T if kind == "weight" and value.dim() == 2 else value  # its layers keep them turned
            given[f"h.{number}.{layers[layer]}.{kind}"] = turned
    missing, unexpected = theirs.transformer.load_state_dict(given, strict=False)
    assert (missing, unexpected) == ([], [])
    tokens = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), theirs.eval()(tokens))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RecipeError, match="width is 16 and heads are 3"):
        tiny(heads=3)
    with pytest.raises(InputError, match="13 tokens in a row, but the model looks at 12"):
        tiny()(torch.zeros(1, 13, dtype=torch.int64))


# --- what comes next --------------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    """The next token is one more than the last one, surely; the one after it half as likely as it could be."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.anything, self.context = torch.nn.Parameter(torch.zeros(1)), context

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= self.context
        logits = torch.full((*tokens.shape, 10), -30.0)
        logits.scatter_(2, ((tokens + 1) % 10)[..., None], 5.0)
        logits.scatter_(2, ((tokens + 2) % 10)[..., None], 4.0)
        return logits.transpose(1, 2)


def test_the_likeliest_token_is_taken_at_temperature_zero() -> None:
    assert generate(Counting(3), [1, 2, 3, 4], 4, context=3, temperature=0) == [5, 6, 7, 8]
    assert generate(Counting(3), [1], 8, context=3, temperature=0, end=6) == [2, 3, 4, 5]
    assert generate(Counting(3), [1], 6, context=3, top_k=1, seed=9) == [2, 3, 4, 5, 6, 7]
    assert generate(Counting(3), [1], 0, context=3) == []


def test_what_is_drawn_is_a_function_of_the_seed_and_leaves_the_generators() -> None:
    before = torch.get_rng_state()
    drawn = [generate(Counting(3), [0], 30, context=3, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), before)
    steps = [(after - first) % 10 for first, after in zip([0, *drawn[0]], drawn[0], strict=False)]
    assert set(steps) == {1, 2}


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    ones = sum(generate(Counting(3), [0], 1, context=3, seed=seed, temperature=2.0) == [1] for seed in range(400))
    expected = 400 / (1 + math.exp(-0.5))
    assert abs(ones - expected) < 4 * math.sqrt(400 * 0.25)


def test_numbers_out_of_range_are_refused() -> None:
    for wrong in ({"temperature": -1.0}, {"top_k": 0}):
        with pytest.raises(InputError, match="temperature >= 0"):
            generate(Counting(3), [0], 1, context=3, **wrong)  # type: ignore[arg-type]


def test_the_task_goes_on_with_a_text_and_tells_what_may_come(tmp_path: Path) -> None:
    task = language_task((), context=12)
    assert task.complete is not None
    model = tiny()
    texts = {task.complete(model, "begin", 5) for _ in range(2)}
    assert len(texts) == 1
    assert isinstance(task.complete(model, "", 3), str)
    (tmp_path / "a.txt").write_text("some text that is long")
    inputs = task.read(tmp_path / "a.txt")
    assert bytes(inputs.tolist()) == b"that is long"
    told = task.tell(model.eval()(inputs[None]))["next"]
    assert len(told) == 5
    assert 0 < sum(token["probability"] for token in told) < 1
    logits = torch.full((3, 2), 0.0)
    logits[1, 1] = 100.0
    assert next_tokens(Bytes(), logits)["next"][0] == {"token": "0x01", "probability": 1.0}
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="is empty"):
        task.read(tmp_path / "a.txt")


# --- training ---------------------------------------------------------------------------------------------

TINY = (
    "data.options.train_tokens=1500",
    "data.options.evaluation_tokens=333",
    "data.options.context=16",
    "model.options.width=16",
    "model.options.heads=2",
    "model.options.blocks=1",
    "model.options.dropout=0.1",
    "batch_size=8",
)


def train(place: Path, processes: int, *overrides: str, name: str) -> dict[str, Any]:
    sets = [f"--set={override}" for override in (*TINY, *overrides)]
    assert here("train", "language", "--processes", processes, "--name", name, *sets, cwd=place) == EXIT_DONE
    [told] = events(place / "runs" / name, "evaluation")
    return {"weights": weights(place / "runs" / name), "loss": told["loss"], "perplexity": told["perplexity"]}


def test_processes_change_no_bit_and_perplexity_is_that_of_all_tokens(tmp_path: Path) -> None:
    one, three = (train(tmp_path, processes, name=f"on-{processes}") for processes in (1, 3))
    assert three == one
    [counted] = events(tmp_path / "runs" / "on-3", "tokens")
    assert (counted["samples"], counted["tokens"], counted["padding"]) == (
        94,
        1500,
        4,
    )  # the last block has 12, beside one of 16
    splits = load_language(train_tokens=1500, evaluation_tokens=333, context=16, cache=str(tmp_path / "cache"))
    model = tiny(width=16, heads=2, blocks=1, context=64)
    load_model(tmp_path / "runs" / "on-3" / "checkpoints" / "last", model)
    assert len(splits.evaluation) == 21
    inputs, targets = padded([splits.evaluation[index] for index in range(21)])
    with torch.no_grad():
        logits = model.eval()(inputs).double().movedim(1, 2).numpy()
    counted = targets.numpy() != -100
    shifted = logits - logits.max(axis=2, keepdims=True)
    logs = shifted - numpy.log(numpy.exp(shifted).sum(axis=2, keepdims=True))
    losses = -numpy.take_along_axis(logs, numpy.maximum(targets.numpy(), 0)[..., None], axis=2)[..., 0][counted]
    assert len(losses) == 333
    assert one["perplexity"] == math.exp(one["loss"])
    assert one["perplexity"] == pytest.approx(numpy.exp(losses.mean()), rel=1e-6)


@pytest.mark.slow
def test_the_gpt2_of_transformers_trains_with_its_tied_weights(tmp_path: Path) -> None:
    runs = [train(tmp_path, processes, "model.name=transformers:gpt2", name=f"hf-{processes}") for processes in (1, 4)]
    assert runs[0] == runs[1]
    assert runs[0]["loss"] < math.log(257)
