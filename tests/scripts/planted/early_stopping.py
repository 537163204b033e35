"""Obstacle: the training stops when a metric has not improved."""

import sys

from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
best = 0.0
waited = 0
for epoch in range(20):
    train_epoch(model, optimizer, batches_of(dataset))
    loss, accuracy = evaluate(model, dataset)
    print(f"epoch {epoch}: {loss:.6f} {accuracy:.6f}")
    waited = 0 if accuracy > best else waited + 1
    best = max(best, accuracy)
    if waited == 2 or accuracy > 0.99:
        print("stopped")
        break
