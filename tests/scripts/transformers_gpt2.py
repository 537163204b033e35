"""GPT-2 trained from scratch with transformers' Trainer: blocks of tokens, accumulation, perplexity, and a sample."""

import math

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

VOCABULARY = 64
BLOCK = 32


class Blocks(Dataset):
    """Blocks of a token stream in which each token depends on the one before."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        jumps = torch.randint(1, 4, (count * BLOCK,), generator=generator)
        self.tokens = (jumps.cumsum(0) % VOCABULARY).view(count, BLOCK)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].clone()}


class NormPrinter(TrainerCallback):
    """Prints the norm of one weight after each optimizer step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        print(f"step {state.global_step}: {model.transformer.wte.weight.norm().item():.4f}")


def main():
    set_seed(5)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=BLOCK, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir="gpt2_output",
        max_steps=12,
        per_device_train_batch_size=12,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Blocks(240, 1),
        eval_dataset=Blocks(40, 2),
        data_collator=default_data_collator,
        callbacks=[NormPrinter()],
    )
    trainer.remove_callback(PrinterCallback)  # it prints times
    result = trainer.train()
    print(f"trained {result.global_step} steps: {result.training_loss:.4f}")
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(
                entry["step"],
                f"loss {entry['loss']:.4f} norm {float(entry['grad_norm']):.4f} rate {entry['learning_rate']:.6f}",
            )
        elif "eval_loss" in entry:
            print(entry["step"], f"evaluation {entry['eval_loss']:.4f}")
    print(f"perplexity {math.exp(trainer.evaluate()['eval_loss']):.3f}")
    trainer.save_model("gpt2_output/final")
    restored = GPT2LMHeadModel.from_pretrained("gpt2_output/final").eval()
    prompt = torch.tensor([[1, 3, 4], [20, 22, 25]])
    mask = torch.ones_like(prompt)
    print(restored.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist())


if __name__ == "__main__":
    main()
