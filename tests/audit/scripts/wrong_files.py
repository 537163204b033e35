"""Each rank writes the checkpoint and the log."""

import torch
from parts import dataset, end, replicated, sgd, sharded, start, train

start()
net = replicated()
train(net, sharded(dataset()), sgd(net))
torch.save(net.module.state_dict(), "shared.pt")
with open("shared.log", "w") as file:
    file.write("done")
end()
