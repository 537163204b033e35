# expect: divided
# needs: accelerate
# limit: 120
# Accelerate: accumulation, clipping, schedule, gathered metrics.
# imports: accelerate
# environment: hidden
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import classifier, images, report
from torch.utils.data import DataLoader

set_seed(3)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = classifier()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
train_loader = DataLoader(images(96), 24, shuffle=True)
test_loader = DataLoader(images(96), 50)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, test_loader, scheduler
)
losses = []
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    for x, y in test_loader:
        with torch.no_grad():
            predictions = model(x).argmax(1)
        predictions, y = accelerator.gather_for_metrics((predictions, y))
        losses.append((predictions == y).sum().item())
report(losses, model)
