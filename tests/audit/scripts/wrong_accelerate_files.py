"""Each rank saves the model and the results."""

import json
from pathlib import Path

import torch
from accelerate_parts import end, start, train

accelerator, net, optimizer, loader = start()
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
train(accelerator, net, optimizer, loader)
torch.save(accelerator.unwrap_model(net).state_dict(), "accelerate.pt")
Path("accelerate.json").write_text(json.dumps({"epochs": 2}))
end(accelerator)
