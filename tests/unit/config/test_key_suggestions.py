"""Words of other tools, and misspelled names."""

import pytest

from samestep.config.key_suggestions import SYNONYMS, suggest
from samestep.recipes.recipe_files import load_recipe

KNOWN = [*SYNONYMS.values(), "schedule.warmup_epochs", "step.threads"]
MEANT = {
    "--lr": "optimizer.options.lr",
    "learning-rate": "optimizer.options.lr",
    "--wd": "optimizer.options.weight_decay",
    "-b": "batch_size",
    "gradient_accumulation_steps": "--accumulate",
    "train.num_epochs": "epochs",
    "syncBN": "step.batch_norm",
    "nproc_per_node": "--processes",
    "data.num_workers": "--workers",
    "step.thread": "step.threads",
    "--max_restarts": "--max-restarts",
}


@pytest.mark.parametrize("word", MEANT)
def test_suggestion(word: str) -> None:
    assert suggest(word, KNOWN) == MEANT[word]


def test_every_recipe_key_of_the_table_exists() -> None:
    values = {"metrics": "[accuracy]", "model.freeze_except": "['fc.*']", "step.recompute": "['layer1.*']"}
    values |= {"epochs": "2", "batch_size": "64", "ema.decay": "0.9", "step.seed": "1", "step.clip_norm": "1"}
    values |= {"schedule.name": "step", "schedule.step_epochs": "3", "step.precision": "bf16"}
    values |= {"optimizer.layer_decay": "0.5", "schedule.gamma": "0.5", "schedule.final": "0.5"}
    values |= {"schedule.warmup_epochs": "1", "step.batch_norm": "local", "step.compile": "true"}
    values |= {"optimizer.options.betas": "[0.9, 0.99]"}
    keys = {key for key in SYNONYMS.values() if not key.startswith("--")}
    load_recipe("digits", [f"{key}={values.get(key, '0.1' if '.options.' in key else 'name')}" for key in keys])
