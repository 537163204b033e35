"""A Wasserstein network with a gradient penalty on digits."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.autograd import grad as torch_grad
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self, latent_dim=16, dim=32):
        super().__init__()
        self.latent_dim = latent_dim
        self.net = nn.Sequential(
            nn.Linear(latent_dim, dim),
            nn.BatchNorm1d(dim),
            nn.LeakyReLU(0.2),
            nn.Linear(dim, dim * 2),
            nn.LeakyReLU(0.2),
            nn.Linear(dim * 2, 64),
            nn.Sigmoid(),
        )

    def forward(self, z):
        return self.net(z).view(-1, 1, 8, 8)

    def sample_latent(self, num_samples):
        return torch.randn((num_samples, self.latent_dim))


class Critic(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.image_to_features = nn.Sequential(
            nn.Conv2d(1, dim, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(dim, 2 * dim, 3, 2, 1), nn.LeakyReLU(0.2)
        )
        self.features_to_score = nn.Linear(2 * dim * 4, 1)

    def forward(self, x):
        x = self.image_to_features(x)
        return self.features_to_score(x.view(x.size(0), -1))


class Trainer:
    def __init__(self, generator, critic, gen_optimizer, critic_optimizer, gp_weight=10, critic_iterations=3):
        self.G = generator
        self.G_opt = gen_optimizer
        self.D = critic
        self.D_opt = critic_optimizer
        self.losses = {"G": [], "D": [], "GP": [], "gradient_norm": []}
        self.num_steps = 0
        self.gp_weight = gp_weight
        self.critic_iterations = critic_iterations

    def _critic_train_iteration(self, data):
        generated = self.sample_generator(data.size(0))
        d_real = self.D(data)
        d_generated = self.D(generated)
        penalty = self._gradient_penalty(data, generated)
        self.losses["GP"].append(penalty.item())
        self.D_opt.zero_grad()
        d_loss = d_generated.mean() - d_real.mean() + penalty
        d_loss.backward()
        self.D_opt.step()
        self.losses["D"].append(d_loss.item())

    def _generator_train_iteration(self, data):
        self.G_opt.zero_grad()
        generated = self.sample_generator(data.size(0))
        g_loss = -self.D(generated).mean()
        g_loss.backward()
        self.G_opt.step()
        self.losses["G"].append(g_loss.item())

    def _gradient_penalty(self, real_data, generated_data):
        batch_size = real_data.size(0)
        alpha = torch.rand(batch_size, 1, 1, 1).expand_as(real_data)
        interpolated = alpha * real_data.data + (1 - alpha) * generated_data.data
        interpolated.requires_grad_(True)
        prob = self.D(interpolated)
        gradients = torch_grad(
            outputs=prob,
            inputs=interpolated,
            grad_outputs=torch.ones(prob.size()),
            create_graph=True,
            retain_graph=True,
        )[0]
        gradients = gradients.view(batch_size, -1)
        self.losses["gradient_norm"].append(gradients.norm(2, dim=1).mean().item())
        gradients_norm = torch.sqrt(torch.sum(gradients**2, dim=1) + 1e-12)
        return self.gp_weight * ((gradients_norm - 1) ** 2).mean()

    def _train_epoch(self, data_loader):
        for data, _ in data_loader:
            self.num_steps += 1
            self._critic_train_iteration(data)
            if self.num_steps % self.critic_iterations == 0:
                self._generator_train_iteration(data)
            if self.num_steps % 3 == 0:
                print(f"Iteration {self.num_steps}")
                for name, values in self.losses.items():
                    print(f"  {name}: {values[-1]:.4f}")

    def train(self, data_loader, epochs):
        fixed_latents = self.G.sample_latent(9)
        for epoch in range(epochs):
            self._train_epoch(data_loader)
            self.G.eval()
            with torch.no_grad():
                picture = self.G(fixed_latents).cpu().numpy()
            self.G.train()
            np.save(f"wgan_samples_{epoch}.npy", picture)
            print(f"Epoch {epoch + 1}: mean of samples {picture.mean():.4f}, deviation {picture.std():.4f}")

    def sample_generator(self, num_samples):
        return self.G(self.G.sample_latent(num_samples))


torch.manual_seed(4)
digits = load_digits(n_class=3)
images = torch.Tensor(digits.images).unsqueeze(1) / 16
data_loader = DataLoader(TensorDataset(images[:300], torch.tensor(digits.target[:300])), batch_size=40, shuffle=True)
generator, critic = Generator(), Critic()
G_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
D_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
trainer = Trainer(generator, critic, G_optimizer, D_optimizer)
trainer.train(data_loader, epochs=3)
