"""Neural ordinary differential equation with a Runge-Kutta solver of its own, fitted to a spiral."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim

parser = argparse.ArgumentParser("ODE demo")
parser.add_argument("--data_size", type=int, default=200)
parser.add_argument("--batch_time", type=int, default=8)
parser.add_argument("--batch_size", type=int, default=20)
parser.add_argument("--niters", type=int, default=30)
parser.add_argument("--test_freq", type=int, default=10)
args = parser.parse_args()
np.random.seed(0)
torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def rk4_step(func, t, dt, y):
    k1 = func(t, y)
    k2 = func(t + dt / 2, y + dt * k1 / 2)
    k3 = func(t + dt / 2, y + dt * k2 / 2)
    k4 = func(t + dt, y + dt * k3)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def odeint(func, y0, t):
    ys = [y0]
    for i in range(len(t) - 1):
        ys.append(rk4_step(func, t[i], t[i + 1] - t[i], ys[-1]))
    return torch.stack(ys)


true_y0 = torch.tensor([[2.0, 0.0]]).to(device)
t = torch.linspace(0.0, 10.0, args.data_size).to(device)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]).to(device)


class Lambda(nn.Module):
    def forward(self, t, y):
        return torch.mm(y**3, true_A)


with torch.no_grad():
    true_y = odeint(Lambda(), true_y0, t)


def get_batch():
    s = np.random.choice(np.arange(args.data_size - args.batch_time, dtype=np.int64), args.batch_size, replace=False)
    s = torch.from_numpy(s)
    batch_y0 = true_y[s][:, 0]
    batch_t = t[: args.batch_time]
    batch_y = torch.stack([true_y[s + i][:, 0] for i in range(args.batch_time)], dim=0)
    return batch_y0.to(device), batch_t.to(device), batch_y.to(device)


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


class RunningAverageMeter:
    def __init__(self, momentum=0.97):
        self.momentum = momentum
        self.val, self.avg = None, 0

    def update(self, val):
        self.avg = val if self.val is None else self.avg * self.momentum + val * (1 - self.momentum)
        self.val = val


if __name__ == "__main__":
    func = ODEFunc().to(device)
    optimizer = optim.RMSprop(func.parameters(), lr=3e-3)
    loss_meter = RunningAverageMeter(0.9)
    for itr in range(1, args.niters + 1):
        optimizer.zero_grad()
        batch_y0, batch_t, batch_y = get_batch()
        pred_y = odeint(func, batch_y0, batch_t).to(device)
        loss = torch.mean(torch.abs(pred_y - batch_y))
        loss.backward()
        optimizer.step()
        loss_meter.update(loss.item())
        if itr % args.test_freq == 0:
            with torch.no_grad():
                pred_y = odeint(func, true_y0, t)
                loss = torch.mean(torch.abs(pred_y - true_y))
                print(f"Iter {itr:04d} | Average {loss_meter.avg:.6f} | Total Loss {loss.item():.6f}")
    np.save("trajectory.npy", pred_y.cpu().numpy())
    print("end of the trajectory:", np.load("trajectory.npy")[-1, 0].round(3).tolist())
