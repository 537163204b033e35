"""The model is not prepared."""

from accelerate_parts import end, start, train

accelerator, net, optimizer, loader = start()
optimizer, loader = accelerator.prepare(optimizer, loader)
train(accelerator, net, optimizer, loader)
end(accelerator)
