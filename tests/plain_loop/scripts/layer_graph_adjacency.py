# expect: divided
# Graph convolution on dense adjacency, one small graph per row, with node masks and a readout.
import torch
from common import report
from torch import nn


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 2)

    def forward(self, nodes, adjacency, mask):
        adjacency = adjacency / adjacency.sum(2, keepdim=True).clamp(min=1)
        for layer in self.layers:
            nodes = torch.relu(layer(torch.bmm(adjacency, nodes))) * mask[:, :, None]
        return self.head(nodes.amax(1))


model = GraphNet()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for nodes in (5, 6, 5, 7, 6, 5, 7, 5):
    adjacency = (torch.rand(9, nodes, nodes) < 0.4).double()
    mask = torch.arange(nodes) < torch.randint(2, nodes + 1, (9, 1))
    loss = nn.functional.cross_entropy(model(torch.randn(9, nodes, 4), adjacency, mask), torch.randint(0, 2, (9,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
