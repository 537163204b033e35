# expect: divided
# Federated averaging: each round trains a deep copy and a pickled copy of the model.
import copy
import pickle

import torch.nn.functional as F
from common import batches, perceptron, report, sgd

server = perceptron()
# + server = samestep.parallel(server)
losses = []
for start in range(5):
    clients = [copy.deepcopy(server), pickle.loads(pickle.dumps(server))]
    for client, (x, y) in zip(clients, batches()[2 * start :]):
        optimizer = sgd(client)
        loss = F.cross_entropy(client(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    states = [client.state_dict() for client in clients]
    server.load_state_dict({name: sum(state[name] for state in states) / 2 for name in states[0]})
report(losses, server)
