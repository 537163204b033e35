"""Text models of transformers by class name and from a folder, with its tokenizer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.system import here, weights
from samestep.errors import EXIT_DONE, RecipeError
from samestep.zoo.model_libraries import transformers_model
from samestep.zoo.models import GPT
from samestep.zoo.texts import collate_texts
from samestep.zoo.tokenizers import ByteTokenizer, read_tokenizer

BERT, ROBERTA = "BertForSequenceClassification", "RobertaForSequenceClassification"
SIZES = {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
DATA = {"num_classes": 3, "vocabulary": 258, "padding": 257, "longest": 40}
WORDS = {"vocabulary": 11, "padding": 0}


def made(name: str, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers_model(name)(**{**DATA, **options}).eval()


@pytest.mark.parametrize("name", [BERT, ROBERTA])
def test_padding_does_not_change_outputs(name: str) -> None:
    model = made(name, **SIZES)
    samples = [(torch.tensor(ByteTokenizer().encode_framed(text)), 0) for text in ("short", "a longer text than that")]
    together, _ = collate_texts(samples, padding=257)
    with torch.no_grad():
        both = model(**together)
        for number, sample in enumerate(samples):
            alone, _ = collate_texts([sample], padding=257)
            torch.testing.assert_close(both[number : number + 1], model(**alone))
    assert both.shape == (2, 3)


def test_gpt2_computes_the_same_as_ours() -> None:
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2}
    ours = GPT(**sizes, block_size=12).eval()  # type: ignore[arg-type]
    theirs = transformers_model("GPT2LMHeadModel")(num_classes=257, n_positions=12, **sizes).eval()
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight":
            own = ours.state_dict()[name.removeprefix("transformer.").replace("h.", "blocks.", 1)]
            tensor.copy_(own.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else own)
    tokens = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of save_pretrained with a small BERT and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("bert")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *["it", "was", "a", "very", "good", "bad", "film"]]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    tokenizer.save_pretrained(place)
    made(BERT, **SIZES, **WORDS).save_pretrained(place)
    return place


def test_folder_and_json_file_give_equal_tokenizers(folder: Path) -> None:
    tokenizers = [read_tokenizer(str(path), 5) for path in (folder, folder / "tokenizer.json")]
    for tokenizer in tokenizers:
        assert tokenizer.encode_framed("it was a very good film") == [2, 4, 5, 6, 3]
        assert (tokenizer.padding, tokenizer.size) == (0, 11)
        assert tokenizer.decode([2, 6, 8, 3]) == "a good"
        assert tokenizer.name(10) == "film"
    assert tokenizers[0].digest == tokenizers[1].digest


def test_weights_of_a_folder_are_loaded_on_request(folder: Path) -> None:
    saved = made(BERT, **SIZES, **WORDS).state_dict()
    loaded = made(str(folder), **WORDS, load_weights=True).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        other = transformers_model(str(folder))(**{**DATA, **WORDS}).state_dict()
    name = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(other[name], saved[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has vocab_size 11; the data need 258"),
        ({**WORDS, "longest": 41}, "has max_position_embeddings 40; the data need 41"),
        ({**WORDS, "num_classes": 5, "load_weights": True}, "ignore_mismatched_sizes"),
        ({**WORDS, "hidden_sizes": 5}, "model.options.hidden_sizes is not an option"),
    ],
)
def test_folder_that_does_not_fit_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        made(str(folder), **options)


@pytest.mark.long
@pytest.mark.parametrize("name", [BERT, ROBERTA, "folder"])
def test_weights_are_equal_on_one_and_three_processes(tmp_path: Path, folder: Path, name: str) -> None:
    rows = [f"it was a {'good' if number % 2 else 'bad'} film {number},{number % 3}" for number in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    model = f"{{name: 'transformers:{name}', options: {SIZES}}}"
    more: tuple[str, ...] = ()
    if name == "folder":
        model = f"{{name: 'transformers:{folder}', options: {{load_weights: true}}}}"
        more = (f"data.options.tokenizer={folder}",)
    settings = ("data.options.path=a.csv", "data.options.longest=30", "batch_size=16", "microbatches=4", "epochs=1")
    results = []
    for count in (1, 3):
        arguments = ("--processes", count, "--name", count, *settings, *more, f"model={model}")
        assert here("train", "texts", *arguments, cwd=tmp_path) == EXIT_DONE
        results.append(weights(tmp_path / "runs" / str(count)))
    assert results[0] == results[1]
