"""LoRA on a tiny GPT-2 with PEFT: only the adapters are trained, saved, loaded again and merged."""

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 50
LENGTH = 24


def make_base():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def make_tokens(count):
    """Return sequences [count, LENGTH] that repeat a pattern of four tokens."""
    patterns = torch.randint(1, VOCABULARY, (count, 4))
    return patterns.repeat(1, LENGTH // 4)


def evaluate(model, loader):
    model.eval()
    total = 0.0
    count = 0
    with torch.inference_mode():
        for (tokens,) in loader:
            loss = model(input_ids=tokens, labels=tokens).loss
            total += loss.item() * len(tokens)
            count += len(tokens)
    model.train()
    return total / count


def main():
    base = make_base()
    torch.manual_seed(8)
    train = DataLoader(TensorDataset(make_tokens(160)), batch_size=16, shuffle=True)
    val = DataLoader(TensorDataset(make_tokens(40)), batch_size=16)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["c_attn", "c_proj"],
        fan_in_fan_out=True,
    )
    model = get_peft_model(base, config)
    model.print_trainable_parameters()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-3)
    print(f"before: {evaluate(model, val):.4f}")
    for epoch in range(2):
        for step, (tokens,) in enumerate(train):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 0:
                print(f"epoch {epoch} step {step}: {loss.item():.4f}")
        print(f"epoch {epoch}: {evaluate(model, val):.4f}")

    model.save_pretrained("adapter")
    again = PeftModel.from_pretrained(make_base(), "adapter")
    print(f"loaded: {evaluate(again, val):.4f}")
    merged = again.merge_and_unload()
    print(f"merged: {evaluate(merged, val):.4f}", type(merged).__name__)
    with torch.no_grad(), model.disable_adapter():
        tokens = next(iter(val))[0]
        print(f"without adapter: {model(input_ids=tokens, labels=tokens).loss.item():.4f}")


if __name__ == "__main__":
    main()
