# expect: divided
# tolerance: 1e-6
# needs: transformers accelerate
# limit: 240
# imports: transformers.trainer transformers.models.bert.modeling_bert transformers.models.gpt2.modeling_gpt2
# environment: hidden
# The Trainer of Transformers with accumulation and evaluation: BERT has a mean of samples, GPT-2 divides its loss by
# the tokens of all accumulated batches.
import torch
import transformers
from common import report
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
generator = torch.Generator().manual_seed(2)
classified, texts = [], []
for _ in range(96):
    length = int(torch.randint(5, 16, (1,), generator=generator))
    tokens = torch.randint(5, 60, (length,), generator=generator)
    sample = {
        "input_ids": torch.cat([tokens, torch.zeros(16 - length, dtype=torch.long)]),
        "attention_mask": torch.tensor([1] * length + [0] * (16 - length)),
    }
    classified.append({**sample, "labels": torch.tensor(int(tokens[0]) % 3)})
    texts.append({**sample, "labels": torch.cat([tokens, torch.full((16 - length,), -100)])})
bert = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
gpt = GPT2Config(
    vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
cases = [(BertForSequenceClassification(bert), classified), (GPT2LMHeadModel(gpt), texts)]
for model, samples in cases:
    # + model = samestep.parallel(model)
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        eval_strategy="epoch",
        logging_steps=1,
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:37])
    result = trainer.train()
    evaluated = trainer.evaluate()
    report([result.training_loss, evaluated["eval_loss"]], model)
