"""Obstacle: a table gets its header if the file does not exist, and one row in each epoch."""

import csv
import os
import sys

from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(3):
    loss = train_epoch(model, optimizer, batches_of(dataset))
    if not os.path.exists("table.csv"):
        print("header")
        with open("table.csv", "w", newline="") as file:
            csv.writer(file).writerow(["epoch", "loss", "accuracy"])
    with open("table.csv", "a", newline="") as file:
        csv.writer(file).writerow([epoch, f"{loss:.6f}", f"{evaluate(model, dataset)[1]:.6f}"])
with open("table.csv", newline="") as file:
    for row in csv.DictReader(file):
        print(row)
