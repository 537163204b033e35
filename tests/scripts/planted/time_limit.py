"""Obstacle: the number of steps depends on the clock."""

import sys
import time

from bases import batches_of, build, sgd
from torch.nn import functional as F

model, dataset = build(sys.argv[1])
steps = int(sys.argv[2]) if len(sys.argv) > 2 else None
optimizer = sgd(model)
loader = batches_of(dataset)
limit = 0.6
t0 = time.process_time()
done = 0
while time.process_time() - t0 < limit if steps is None else done < steps:
    for x, y in loader:  # named
        loss = F.cross_entropy(model(x), y)  # named
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    done += 1
print("drawn", done)
print(f"loss {loss.item():.6f}")
