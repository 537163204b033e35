"""BERT for the classification of sentences with transformers' Trainer, a data set of `datasets` and padding to the batch."""

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORDS = {
    "negative": ["awful", "bad", "boring", "dull", "poor", "sad", "weak", "worst"],
    "positive": ["best", "bright", "fine", "funny", "good", "great", "moving", "strong"],
    "other": ["a", "actor", "and", "film", "in", "movie", "of", "plot", "scene", "story", "the", "was", "with"],
}


def make_tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(word for group in WORDS.values() for word in group)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def make_reviews(count, seed):
    generator = np.random.default_rng(seed)
    texts = []
    labels = []
    for _ in range(count):
        label = int(generator.integers(2))
        own = WORDS["positive" if label else "negative"]
        words = [*generator.choice(WORDS["other"], generator.integers(4, 18)), *generator.choice(own, 2)]
        generator.shuffle(words)
        texts.append(" ".join(words))
        labels.append(label)
    return Dataset.from_dict({"text": texts, "label": labels})


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def main():
    set_seed(21)
    tokenizer = make_tokenizer()

    def tokenize(rows):
        return tokenizer(rows["text"], truncation=True, max_length=32, return_token_type_ids=False)

    train = make_reviews(160, 1).map(tokenize, batched=True, remove_columns=["text"])
    evaluation = make_reviews(50, 2).map(tokenize, batched=True, remove_columns=["text"])
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=40,
        num_labels=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    arguments = TrainingArguments(
        output_dir="bert_output",
        per_device_train_batch_size=16,
        per_device_eval_batch_size=25,
        num_train_epochs=2,
        learning_rate=2e-3,
        warmup_steps=4,
        weight_decay=0.01,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    trainer.remove_callback(PrinterCallback)  # it prints times
    trainer.train()
    for entry in trainer.state.log_history:
        kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
        print(entry["step"], {name: f"{entry[name]:.5f}" for name in kept if name in entry})
    metrics = trainer.evaluate()
    print(
        "best",
        f"{trainer.state.best_metric:.4f}",
        "evaluated",
        f"{metrics['eval_accuracy']:.4f} {metrics['eval_loss']:.4f}",
    )
    trainer.save_model("bert_output/final")
    restored = BertForSequenceClassification.from_pretrained("bert_output/final")
    print("restored", f"{sum(value.double().abs().sum().item() for value in restored.parameters()):.3f}")


if __name__ == "__main__":
    main()
