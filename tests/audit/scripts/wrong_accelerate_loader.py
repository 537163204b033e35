"""The loader is not prepared."""

from accelerate_parts import end, start, train

accelerator, net, optimizer, loader = start()
net, optimizer = accelerator.prepare(net, optimizer)
train(accelerator, net, optimizer, loader)
end(accelerator)
