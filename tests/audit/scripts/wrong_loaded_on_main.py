"""Rank 0 alone has the trained weights; ranks evaluate parts of the data, and nothing is trained."""

import torch
from parts import dataset, end, is_main, model, sharded, start

start()
torch.manual_seed(0)
net = model().eval()
if is_main():
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
with torch.no_grad():
    for inputs, _ in sharded(dataset(38), shuffle=False):
        net(inputs)
end()
