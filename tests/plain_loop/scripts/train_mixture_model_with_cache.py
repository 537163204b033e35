# expect: divided
# needs: transformers
# tolerance: 1e-5
# limit: 240
# imports: transformers.models.mixtral.modeling_mixtral
# A mixture of experts that returns the cache of keys and values, in training and evaluation.
import torch
import transformers
from common import report
from transformers import MixtralConfig, MixtralForCausalLM

transformers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float32)
torch.manual_seed(0)
model = MixtralForCausalLM(
    MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        num_local_experts=4,
    )
)
# + model = samestep.parallel(model)
tokens = torch.randint(50, (40, 12), generator=torch.Generator().manual_seed(1))
losses = []
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    ids = tokens[8 * step :][:8]
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(output.loss.item())
model.eval()
with torch.no_grad():
    for step in range(4):
        output = model(input_ids=tokens[7 * step :][:7])
        losses.append(output.past_key_values.layers[1].values.square().mean().item())
report(losses, model)
