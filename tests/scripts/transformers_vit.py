"""ViT for the classification of images with transformers' Trainer, augmentation in the data set and the model resumed."""

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import transforms
from transformers import PrinterCallback, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

LABELS = ["circle", "cross", "square"]


def draw(label, generator):
    image = generator.normal(0.2, 0.1, (16, 16, 3))
    top, left = generator.integers(1, 7, 2)
    rows, columns = np.mgrid[0:8, 0:8]
    distance = np.hypot(rows - 3.5, columns - 3.5)
    mask = {"circle": distance < 4, "cross": abs(rows - columns) < 2, "square": np.maximum(rows, columns) < 7}[label]
    image[top : top + 8, left : left + 8][mask] += generator.uniform(0.3, 0.8, 3)
    return (image.clip(0, 1) * 255).astype(np.uint8)


class Shapes(Dataset):
    def __init__(self, count, seed, augment):
        generator = np.random.default_rng(seed)
        self.labels = generator.integers(0, len(LABELS), count)
        self.images = [draw(LABELS[label], generator) for label in self.labels]
        steps = [transforms.ToPILImage()]
        if augment:
            steps += [transforms.RandomHorizontalFlip(), transforms.RandomCrop(16, padding=2)]
        steps += [transforms.ToTensor(), transforms.Normalize([0.3] * 3, [0.2] * 3)]
        self.transform = transforms.Compose(steps)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.transform(self.images[index]), "labels": int(self.labels[index])}


def collate(examples):
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]).to(torch.get_default_dtype()),
        "labels": torch.tensor([example["labels"] for example in examples]),
    }


def make_model():
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_dropout_prob=0.05,
        num_labels=len(LABELS),
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
    )
    return ViTForImageClassification(config)


def compute_metrics(prediction):
    predicted = prediction.predictions.argmax(axis=1)
    truth = prediction.label_ids
    recalls = [float((predicted[truth == label] == label).mean()) for label in range(len(LABELS))]
    return {"accuracy": float((predicted == truth).mean()), "recall": min(recalls)}


def make_trainer(max_steps):
    arguments = TrainingArguments(
        output_dir="vit_output",
        max_steps=max_steps,
        per_device_train_batch_size=24,
        learning_rate=2e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        logging_steps=2,
        save_steps=8,
        eval_strategy="steps",
        eval_steps=8,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=9,
    )
    trainer = Trainer(
        model=make_model(),
        args=arguments,
        data_collator=collate,
        train_dataset=Shapes(120, 1, augment=True),
        eval_dataset=Shapes(45, 2, augment=False),
        compute_metrics=compute_metrics,
    )
    trainer.remove_callback(PrinterCallback)  # it prints times
    return trainer


def main():
    set_seed(9)
    make_trainer(8).train()
    trainer = make_trainer(16)
    trainer.train(resume_from_checkpoint="vit_output/checkpoint-8")
    for entry in trainer.state.log_history:
        kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_recall")
        print(entry["step"], {name: f"{entry[name]:.5f}" for name in kept if name in entry})
    trainer.save_model("vit_output/final")
    restored = ViTForImageClassification.from_pretrained("vit_output/final").eval().to(torch.get_default_dtype())
    batch = collate([trainer.eval_dataset[index] for index in range(6)])
    with torch.no_grad():
        logits = restored(batch["pixel_values"]).logits
    print(
        [restored.config.id2label[label] for label in logits.argmax(dim=1).tolist()], f"{logits.abs().sum().item():.3f}"
    )


if __name__ == "__main__":
    main()
