# expect: mixed
# processes: 1,3,4
# Some batches have fewer rows than there are ranks.
import torch.nn.functional as F
from common import perceptron, report, train

model = perceptron()
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    rows = 2 if step % 3 == 0 else 11
    return F.cross_entropy(model(x[:rows]), y[:rows])


losses = train(model, loss_function)
report(losses, model)
