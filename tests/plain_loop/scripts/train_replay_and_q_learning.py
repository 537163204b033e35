# expect: mixed
# Deep Q learning: epsilon-greedy acting on one state, a replay memory, a target network, Huber loss.
import random
from collections import deque

import torch
import torch.nn.functional as F
from common import inputs, labels, perceptron, report, update

online, target = perceptron(), perceptron()
target.load_state_dict(online.state_dict())
# + online = samestep.parallel(online)
# + target = samestep.parallel(target)
optimizer = torch.optim.RMSprop(online.parameters(), lr=0.005)
memory, losses = deque(maxlen=40), []
for step in range(60):
    state = inputs[step]
    with torch.no_grad():
        best = online(state[None]).argmax().item()
    action = random.randrange(4) if random.random() < 0.3 else best
    memory.append((state, action, float(action == labels[step]), inputs[step + 1]))
    if step < 16 or step % 4:
        continue
    states, actions, rewards, following = zip(*random.sample(memory, 12), strict=True)
    with torch.no_grad():
        value = torch.tensor(rewards) + 0.9 * target(torch.stack(following)).amax(1)
    chosen = online(torch.stack(states)).gather(1, torch.tensor(actions)[:, None])[:, 0]
    loss = F.huber_loss(chosen, value)
    losses += [update(optimizer, loss), best]
    if step % 8 == 0:
        target.load_state_dict(online.state_dict())
report(losses, online)
