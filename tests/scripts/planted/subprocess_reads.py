"""Obstacle: subprocesses report the version of the code and the machine, whose output is used."""

import subprocess
import sys

from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
version = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True).stdout.split()[0]
epochs = int(subprocess.check_output("echo 2", shell=True))
failed = subprocess.call(["git", "rev-parse", "HEAD"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
print(version, epochs, failed)
optimizer = sgd(model)
for epoch in range(epochs):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
