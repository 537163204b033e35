"""Obstacle: the root logger writes to a file, which is read back."""

import logging
import sys

from bases import batches_of, build, evaluate, sgd, train_epoch

logging.basicConfig(filename="train.log", level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s")
model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(2):
    logging.info("epoch %d: %.6f", epoch, train_epoch(model, optimizer, batches_of(dataset)))
logging.getLogger("end").warning("%.6f %.6f", *evaluate(model, dataset))
with open("train.log") as file:
    print(file.read(), end="")
