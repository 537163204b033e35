# expect: divided
# needs: transformers
# tolerance: 1e-5
# limit: 240
# imports: transformers.models.gpt2.modeling_gpt2 transformers.models.mixtral.modeling_mixtral
# Language models that return the cache of keys and values, as they do by default, in training and evaluation.
import torch
import transformers
from common import report
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

transformers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float32)
torch.manual_seed(0)
sizes = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
gpt = GPT2Config(
    vocab_size=50,
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=16,
    resid_pdrop=0.1,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
first = GPT2LMHeadModel(gpt)
# + first = samestep.parallel(first)
second = LlamaForCausalLM(LlamaConfig(**sizes))
# + second = samestep.parallel(second)
third = Qwen2ForCausalLM(Qwen2Config(**sizes))
# + third = samestep.parallel(third)
fourth = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
# + fourth = samestep.parallel(fourth)
tokens = torch.randint(50, (40, 12), generator=torch.Generator().manual_seed(1))
models = (first, second, third, fourth)
losses = []
for model in models:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(5):
        ids = tokens[8 * step :][:8]
        output = model(input_ids=ids, labels=ids)
        assert output.past_key_values.get_seq_length() == 12
        assert len(output.past_key_values.layers[0].keys) == 8
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    model.eval()
    with torch.no_grad():
        for step in range(4):
            output = model(input_ids=tokens[7 * step :][:7])
            losses.append(output.logits.square().mean().item())
            losses.append(output.past_key_values.layers[1].values.square().mean().item())
report(losses, *models)
