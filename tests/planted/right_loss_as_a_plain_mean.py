"""A scalar loss that is the mean over the samples of a microbatch."""

from parts import Net, Points, accuracy, batches_of, evaluation, fit, seeded, sgd
from torch import nn

import samestep

model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Points()), loss=nn.CrossEntropyLoss(label_smoothing=0.1))
accuracy(model, evaluation())
