"""Physics-informed network for Burgers' equation: derivatives by `autograd.grad` with `create_graph`."""

import numpy as np
import torch
import torch.nn as nn

np.random.seed(1234)
torch.manual_seed(1234)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class DNN(nn.Module):
    def __init__(self, layers):
        super().__init__()
        modules = []
        for i in range(len(layers) - 2):
            modules += [nn.Linear(layers[i], layers[i + 1]), nn.Tanh()]
        modules.append(nn.Linear(layers[-2], layers[-1]))
        self.layers = nn.Sequential(*modules)

    def forward(self, x):
        return self.layers(x)


class PhysicsInformedNN:
    def __init__(self, X_u, u, X_f, layers, nu):
        self.x_u = torch.tensor(X_u[:, 0:1].tolist(), requires_grad=True).to(device)
        self.t_u = torch.tensor(X_u[:, 1:2].tolist(), requires_grad=True).to(device)
        self.x_f = torch.tensor(X_f[:, 0:1].tolist(), requires_grad=True).to(device)
        self.t_f = torch.tensor(X_f[:, 1:2].tolist(), requires_grad=True).to(device)
        self.u = torch.tensor(u.tolist()).to(device)
        self.nu = nu
        self.dnn = DNN(layers).to(device)
        self.optimizer = torch.optim.Adam(self.dnn.parameters(), lr=5e-3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.98)

    def net_u(self, x, t):
        return self.dnn(torch.cat([x, t], dim=1))

    def net_f(self, x, t):
        """The residual of the equation."""
        u = self.net_u(x, t)
        u_t = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
        return u_t + u * u_x - self.nu * u_xx

    def train(self, steps):
        self.dnn.train()
        for step in range(1, steps + 1):
            self.optimizer.zero_grad()
            loss_u = torch.mean((self.u - self.net_u(self.x_u, self.t_u)) ** 2)
            loss_f = torch.mean(self.net_f(self.x_f, self.t_f) ** 2)
            loss = loss_u + loss_f
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            if step % 5 == 0:
                print(f"Iter {step}, Loss: {loss.item():.5e}, Loss_u: {loss_u.item():.5e}, Loss_f: {loss_f.item():.5e}")

    def predict(self, X):
        x = torch.tensor(X[:, 0:1].tolist(), requires_grad=True).to(device)
        t = torch.tensor(X[:, 1:2].tolist(), requires_grad=True).to(device)
        self.dnn.eval()
        u = self.net_u(x, t)
        f = self.net_f(x, t)
        return u.detach().cpu().numpy(), f.detach().cpu().numpy()


x0 = np.random.uniform(-1, 1, (40, 1))
tb = np.random.uniform(0, 1, (30, 1))
sides = np.where(np.random.rand(30, 1) < 0.5, -1.0, 1.0)
X_u_train = np.vstack([np.hstack([x0, np.zeros_like(x0)]), np.hstack([sides, tb])])
u_train = np.vstack([-np.sin(np.pi * x0), np.zeros_like(tb)])
X_f_train = np.vstack([np.random.uniform([-1, 0], [1, 1], (130, 2)), X_u_train])
model = PhysicsInformedNN(X_u_train, u_train, X_f_train, [2, 20, 20, 20, 1], nu=0.01 / np.pi)
model.train(40)
grid = np.stack(np.meshgrid(np.linspace(-1, 1, 11), [0.0, 0.5]), axis=-1).reshape(-1, 2)
u_pred, f_pred = model.predict(grid)
error = np.abs(u_pred[:11, 0] + np.sin(np.pi * grid[:11, 0])).mean()
print(f"Error at the start: {error:.4f}, residual: {np.abs(f_pred).mean():.4f}")
print("u at t = 0.5:", " ".join(f"{v:.3f}" for v in u_pred[11:, 0]))
