"""Text classification in the form of Transformers' guide: dynamic padding, metrics, the best checkpoint."""

import random
import sys

import numpy
from datasets import Dataset
from transformers import (
    BertTokenizer,
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORDS = {0: ["bad", "dull", "poor", "flat"], 1: ["good", "fine", "great", "warm"], 2: ["film", "plot", "cast", "scene"]}


def reviews(count, seed):
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(count)]
    texts = [" ".join(draw.choices(WORDS[label] + WORDS[2] * 2, k=draw.randint(3, 25))) for label in labels]
    return Dataset.from_dict({"text": texts, "label": labels})


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((numpy.argmax(logits, axis=1) == labels).mean()), "count": len(labels)}


def main(folder):
    set_seed(1)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word for words in WORDS.values() for word in words)]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(vocabulary)})

    def preprocess(examples):
        return tokenizer(examples["text"], truncation=True, max_length=32)

    train, test = (reviews(*facts).map(preprocess, batched=True) for facts in ((203, 1), (101, 2)))
    config = DistilBertConfig(
        vocab_size=len(vocabulary), dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32
    )
    arguments = TrainingArguments(
        output_dir=folder,
        learning_rate=2e-3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        num_train_epochs=2,
        weight_decay=0.01,
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to=["tensorboard"],
        use_cpu=True,
    )
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1])
