# expect: divided
# needs: transformers accelerate
# limit: 240
# imports: transformers.trainer transformers.models.bert.modeling_bert
# environment: hidden
# The Trainer of Transformers with BERT, accumulation and evaluation.
import torch
import transformers
from common import report
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
generator = torch.Generator().manual_seed(2)
samples = []
for _ in range(96):
    length = int(torch.randint(5, 16, (1,), generator=generator))
    tokens = torch.randint(5, 60, (length,), generator=generator)
    samples.append(
        {
            "input_ids": torch.cat([tokens, torch.zeros(16 - length, dtype=torch.long)]),
            "attention_mask": torch.tensor([1] * length + [0] * (16 - length)),
            "labels": torch.tensor(int(tokens[0]) % 3),
        }
    )
config = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
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
