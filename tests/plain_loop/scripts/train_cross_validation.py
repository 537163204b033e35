# expect: divided
# Three folds, each with a new model and optimizer.
import torch
import torch.nn.functional as F
from common import batches, inputs, labels, perceptron, report, sgd, update

rows = torch.randperm(66).tensor_split(3)
losses = []
for fold in range(3):
    model = perceptron(hidden=8 + 4 * fold)
    # + model = samestep.parallel(model)
    optimizer = sgd(model)
    own = torch.cat([part for number, part in enumerate(rows) if number != fold])
    for part in own.split(11):
        loss = F.cross_entropy(model(inputs[part]), labels[part])
        update(optimizer, loss)
    model.eval()
    with torch.no_grad():
        for held in rows[fold].split(11):
            losses.append((model(inputs[held]).argmax(1) == labels[held]).sum().item())
        losses += [F.cross_entropy(model(x), y).item() for x, y in batches(3)]
report(losses, model)
