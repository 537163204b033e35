# expect: divided
# The loop calls parts of the model: an encoder alone, and a method of the model that calls them.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch import nn


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = perceptron(12, 3), perceptron(3, 12)
        self.classify = nn.Linear(3, 4)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def predict(self, x):
        return self.classify(self.encoder(x))


model = AutoEncoder()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss = F.mse_loss(model(x), x) + F.cross_entropy(model.predict(x), y) + 0.01 * model.encoder(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        losses += [loss.item(), model.predict(x).argmax(1).sum().item()]
report(losses, model)
