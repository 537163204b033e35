"""Ranks write one file, one after another with a lock, and append to another one."""

from filelock import FileLock
from parts import dataset, end, replicated, sgd, sharded, start, train

start()
net = replicated()
train(net, sharded(dataset()), sgd(net))
with FileLock("locked.txt.lock"), open("locked.txt", "w") as file:
    file.write("done")
with open("appended.txt", "a") as file:
    file.write("done")
end()
