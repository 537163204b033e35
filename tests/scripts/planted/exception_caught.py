"""Obstacle: one epoch raises an exception inside of the model, after some steps; the script reports it and goes on."""

import sys

from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
calls = 0


def fail_once(module, inputs):
    global calls
    calls += 1
    if calls == 5:
        raise RuntimeError("sensor lost")


model.register_forward_pre_hook(fail_once)
for epoch in range(3):
    try:
        print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
    except RuntimeError as error:
        print(f"epoch {epoch} failed: {error}")
        optimizer.zero_grad()
try:
    model(dataset.tensors[0][:, :1])
except RuntimeError as error:
    print("shape", type(error).__name__)
print(calls, "{:.6f} {:.6f}".format(*evaluate(model, dataset)))
