"""Polynomial fit of a sine with tensors alone: no module, no optimizer, `p.data -= lr * p.grad`."""

import math

import torch

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)

N = 203
x = torch.linspace(-math.pi, math.pi, N)
y = torch.sin(x) + 0.05 * torch.randn(N)

a = torch.randn((), requires_grad=True)
b = torch.randn((), requires_grad=True)
c = torch.randn((), requires_grad=True)
d = torch.randn((), requires_grad=True)
scale = torch.tensor([1.0, 0.3, 0.1, 0.03])

learning_rate = 0.1
for t in range(40):
    # Forward pass: predicted y of the whole set.
    y_pred = a * scale[0] + b * scale[1] * x + c * scale[2] * x**2 + d * scale[3] * x**3
    loss = (y_pred - y).pow(2).mean()
    if t % 8 == 7:
        print(t, f"{loss.item():.6f}")
    loss.backward()
    with torch.no_grad():
        for p in (a, b, c, d):
            p.data -= learning_rate * p.grad
            p.grad = None

# The same by minibatches, with a module that is updated by hand.
features = torch.stack([x, x**2 / 3, x**3 / 9], dim=1)
model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0, 1))
loss_fn = torch.nn.MSELoss(reduction="sum")
learning_rate = 2e-3
for epoch in range(6):
    order = torch.randperm(N)
    total = 0.0
    for rows in order.split(64):
        loss = loss_fn(model(features[rows]), y[rows])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= learning_rate * param.grad
        total += loss.item()
    print(f"epoch {epoch}: {total / N:.6f}")
w = model[0]
print(
    f"Result by tensors: y = {a.item():.3f} + {b.item() * 0.3:.3f} x + {c.item() * 0.1:.3f} x^2 + {d.item() * 0.03:.3f} x^3"
)
print(
    f"Result by module: y = {w.bias.item():.3f} + {w.weight[0, 0]:.3f} x + {w.weight[0, 1] / 3:.3f} x^2 + {w.weight[0, 2] / 9:.3f} x^3"
)
