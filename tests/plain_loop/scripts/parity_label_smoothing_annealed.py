# expect: divided
# Label smoothing changes in the loop.
from common import batches, perceptron, report, sgd
from torch import nn

criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    criterion.label_smoothing = 0.2 - 0.1 * epoch
    for x, y in batches(4):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
