"""Obstacle: a subprocess appends to a file, which the script reads."""

import subprocess
import sys

from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(2):
    loss = train_epoch(model, optimizer, batches_of(dataset))
    subprocess.run(f"echo {epoch} {loss:.6f} >> losses.txt", shell=True, check=True)  # named
with open("losses.txt") as file:
    print(file.read(), end="")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
