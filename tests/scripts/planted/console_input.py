"""Obstacle: numbers are read from the console, before and in the middle of training."""

import sys

from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
epochs = int(input("epochs: "))
optimizer = sgd(model)
for epoch in range(epochs):
    for group in optimizer.param_groups:
        group["lr"] = float(sys.stdin.readline())
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
try:
    input("more? ")
except EOFError:
    print("end of input")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
