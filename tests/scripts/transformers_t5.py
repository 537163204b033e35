"""T5 that learns to reverse sequences with transformers' Seq2SeqTrainer: padded labels, label smoothing, generated metrics."""

import random

import numpy as np
from tokenizers import Tokenizer, models
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

PAD, EOS, FIRST = 0, 1, 3
LETTERS = 12


class Reversals(Dataset):
    def __init__(self, count, seed):
        draw = random.Random(seed)
        self.rows = [[draw.randrange(LETTERS) + FIRST for _ in range(draw.randint(3, 7))] for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"input_ids": [*row, EOS], "attention_mask": [1] * (len(row) + 1), "labels": [*row[::-1], EOS]}


def make_tokenizer():
    letters = {chr(ord("a") + number): FIRST + number for number in range(LETTERS)}
    vocabulary = {"<pad>": PAD, "</s>": EOS, "<unk>": 2, **letters}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def compute_metrics(prediction):
    generated, labels = prediction
    hits = 0
    total = 0
    for own, label in zip(generated, labels, strict=True):
        wanted = label[label >= 0]
        given = own[1 : len(wanted) + 1]
        hits += int((given == wanted[: len(given)]).sum())
        total += len(wanted)
    return {"letters": hits / total, "length": float(np.mean([(row > 0).sum() for row in generated]))}


def main():
    set_seed(13)
    tokenizer = make_tokenizer()
    config = T5Config(
        vocab_size=FIRST + LETTERS,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=PAD,
        tie_word_embeddings=True,
    )
    model = T5ForConditionalGeneration(config)
    arguments = Seq2SeqTrainingArguments(
        output_dir="t5_output",
        num_train_epochs=2,
        per_device_train_batch_size=24,
        per_device_eval_batch_size=16,
        learning_rate=4e-3,
        label_smoothing_factor=0.1,
        predict_with_generate=True,
        generation_max_length=9,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=Reversals(170, 1),
        eval_dataset=Reversals(40, 2),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.remove_callback(PrinterCallback)  # it prints times
    trainer.train()
    for entry in trainer.state.log_history:
        kept = ("loss", "grad_norm", "eval_loss", "eval_letters", "eval_length")
        print(entry["step"], {name: f"{entry[name]:.4f}" for name in kept if name in entry})
    output = trainer.predict(Reversals(10, 3), max_length=6, num_beams=2)
    print("beam", output.predictions[:3].tolist(), f"{output.metrics['test_letters']:.4f}")
    trainer.save_model("t5_output/final")


if __name__ == "__main__":
    main()
