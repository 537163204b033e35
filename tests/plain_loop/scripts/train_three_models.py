# expect: divided
# An encoder, a decoder and a critic of their codes: three calls in one graph, two optimizers.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

encoder = perceptron(12, 3)
decoder = perceptron(3, 12)
critic = perceptron(3, 1)
# + encoder = samestep.parallel(encoder)
# + decoder = samestep.parallel(decoder)
# + critic = samestep.parallel(critic)
optimizer = sgd(encoder, decoder, lr=0.1)
critic_optimizer = sgd(critic, lr=0.1)
losses = []
for x, _ in batches():
    code = encoder(x)
    judged = critic(code)
    loss = F.mse_loss(decoder(code), x) + 0.1 * F.softplus(-judged).mean()
    update(optimizer, loss)
    prior = torch.randn(len(x), 3)
    critic_loss = F.softplus(-critic(prior)).mean() + F.softplus(critic(code.detach())).mean()
    update(critic_optimizer, critic_loss)
    losses += [loss.item(), critic_loss.item()]
report(losses, encoder, decoder, critic)
