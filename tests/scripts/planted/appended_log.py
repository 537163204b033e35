"""Obstacle: a log is appended to in each epoch, and read at the end."""

import sys

from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(3):
    loss = train_epoch(model, optimizer, batches_of(dataset))
    with open("log.txt", "a") as file:
        file.write(f"{epoch} {loss:.6f}\n")
        file.write("{:.6f} {:.6f}\n".format(*evaluate(model, dataset)))
with open("log.txt") as file:
    lines = file.read().splitlines()
print(len(lines), *lines, sep="\n")
