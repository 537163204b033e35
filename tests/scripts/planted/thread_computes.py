"""Obstacle: a thread evaluates a copy of the model while the training goes on."""

import copy
import sys
import threading

from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
results = {}
threads = []


def validate(epoch, copied):
    results[epoch] = evaluate(copied, dataset)


for epoch in range(3):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
    threads.append(threading.Thread(target=validate, args=(epoch, copy.deepcopy(model))))
    threads[-1].start()
for thread in threads:
    thread.join()
for epoch in sorted(results):
    print(f"validated {epoch}: " + "{:.6f} {:.6f}".format(*results[epoch]))
