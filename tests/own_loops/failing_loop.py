"""A plain loop in which rank 1 does something else in the sixth step: `failing_loop.py WHAT`."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import samestep
from samestep.view.view import View

View.divides_small_calls = True
what = sys.argv[1]
torch.manual_seed(0)
inputs = torch.randn(64, 6)
targets = inputs[:, :3].argmax(dim=1)
model = samestep.parallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
is_other = not samestep.is_main()
for step in range(8):
    if step == 5 and is_other:
        if what == "raise":
            raise OSError("the switch was off")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "leave":
            break
        if what == "exit":
            sys.exit()
    if step == 5 and what == "wait":
        Path("waiting").touch()
        time.sleep(100)
    loss = functional.cross_entropy(model(inputs), targets)
    if step == 5 and is_other and what == "leave before backward":
        break
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("end", flush=True)
