# expect: mixed: inside of a checkpoint
# The script recomputes the whole model in the backward, by both kinds of checkpointing.
import torch.nn.functional as F
from common import perceptron, report, train
from torch.utils.checkpoint import checkpoint

for reentrant in (False, True):
    model = perceptron()
    # + model = samestep.parallel(model)

    def loss_function(x, y, model=model, reentrant=reentrant):
        return F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=reentrant), y)

    losses = train(model, loss_function)
    report(losses, model)
