"""Trainer in the style of torchvision's references: functions for an epoch, smoothed meters, EMA, warm-up and mixup."""

import argparse
import os
from collections import defaultdict, deque

import torch
import torch.utils.data
import torchvision
from torch import nn
from torchvision.transforms import v2


class SmoothedValue:
    """A window of values and the average of the series."""

    def __init__(self, window_size=20, fmt="{median:.4f} ({global_avg:.4f})"):
        self.deque = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0
        self.fmt = fmt

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg, value=self.deque[-1])


class MetricLogger:
    def __init__(self, delimiter="  "):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **values):
        for name, value in values.items():
            self.meters[name].update(value.item() if isinstance(value, torch.Tensor) else value)

    def __getattr__(self, name):
        if name in self.meters:
            return self.meters[name]
        raise AttributeError(name)

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def log_every(self, iterable, print_freq, header):
        for number, item in enumerate(iterable):
            yield item
            if number % print_freq == 0 or number == len(iterable) - 1:
                print(self.delimiter.join([header, f"[{number}/{len(iterable)}]", str(self)]))


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    """Moving average of parameters and buffers."""

    def __init__(self, model, decay, device="cpu"):
        def average(averaged, current, _):
            return decay * averaged + (1 - decay) * current

        super().__init__(model, device, average, use_buffers=True)


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        if target.ndim == 2:
            target = target.max(dim=1)[1]
        _, predicted = output.topk(max(topk), 1, True, True)
        correct = predicted.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / len(target)) for k in topk]


def train_one_epoch(model, criterion, optimizer, loader, device, epoch, args, model_ema=None):
    model.train()
    metric_logger = MetricLogger()
    metric_logger.meters["lr"] = SmoothedValue(window_size=1, fmt="{value:.5f}")
    for i, (image, target) in enumerate(metric_logger.log_every(loader, args.print_freq, f"Epoch: [{epoch}]")):
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        if model_ema and i % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)
        acc1, acc2 = accuracy(output, target, topk=(1, 2))
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        metric_logger.meters["acc1"].update(acc1.item(), n=image.shape[0])
        metric_logger.meters["acc2"].update(acc2.item(), n=image.shape[0])


def evaluate(model, criterion, loader, device, log_suffix=""):
    model.eval()
    metric_logger = MetricLogger()
    seen = 0
    with torch.inference_mode():
        for image, target in metric_logger.log_every(loader, 100, f"Test: {log_suffix}"):
            image = image.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = model(image)
            acc1, acc2 = accuracy(output, target, topk=(1, 2))
            metric_logger.update(loss=criterion(output, target).item())
            metric_logger.meters["acc1"].update(acc1.item(), n=image.shape[0])
            metric_logger.meters["acc2"].update(acc2.item(), n=image.shape[0])
            seen += image.shape[0]
    print(f"{log_suffix} Acc@1 {metric_logger.acc1.global_avg:.3f} Acc@2 {metric_logger.acc2.global_avg:.3f} of {seen}")
    return metric_logger.acc1.global_avg


class Textures(torch.utils.data.Dataset):
    def __init__(self, count, seed, train):
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 4, (count,), generator=generator)
        self.noise = torch.rand(count, 3, 36, 36, generator=generator) * 0.6
        steps = (
            [v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2, 0.2)] if train else [v2.CenterCrop(32)]
        )
        self.transform = v2.Compose([*steps, v2.Normalize([0.5] * 3, [0.3] * 3)])

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        label = int(self.targets[index])
        stripes = (torch.arange(36) // (label + 1) % 2).to(self.noise.dtype) * 0.4
        return self.transform(self.noise[index] + stripes), label


def main(args):
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    mixup = v2.MixUp(alpha=0.2, num_classes=4)

    def collate_fn(batch):
        return mixup(*torch.utils.data.default_collate(batch))

    train_set = Textures(144, 1, train=True)
    train_loader = torch.utils.data.DataLoader(
        train_set,
        batch_size=args.batch_size,
        sampler=torch.utils.data.RandomSampler(train_set),
        collate_fn=collate_fn if args.mixup else None,
        num_workers=args.workers,
    )
    test_set = Textures(50, 2, train=False)
    test_loader = torch.utils.data.DataLoader(
        test_set, batch_size=args.batch_size, sampler=torch.utils.data.SequentialSampler(test_set)
    )
    model = torchvision.models.ShuffleNetV2([1, 2, 1], [16, 32, 64, 128, 256], num_classes=4).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True)
    main_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs - args.lr_warmup_epochs)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=args.lr_warmup_epochs)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main_scheduler], [args.lr_warmup_epochs])
    model_ema = ExponentialMovingAverage(model, decay=0.8, device=device)

    os.makedirs(args.output_dir, exist_ok=True)
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, train_loader, device, epoch, args, model_ema)
        scheduler.step()
        evaluate(model, criterion, test_loader, device)
        evaluate(model_ema, criterion, test_loader, device, log_suffix="EMA")
        checkpoint = {
            "model": model.state_dict(),
            "model_ema": model_ema.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
            "epoch": epoch,
            "args": args,
        }
        torch.save(checkpoint, os.path.join(args.output_dir, f"model_{epoch}.pth"))
        torch.save(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    saved = torch.load(os.path.join(args.output_dir, "checkpoint.pth"), map_location="cpu", weights_only=False)
    model.load_state_dict(saved["model"])
    evaluate(model, criterion, test_loader, device, log_suffix="Loaded")
    print(sorted(os.listdir(args.output_dir)), saved["epoch"])


def get_args_parser():
    parser = argparse.ArgumentParser(description="Classification Training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-b", "--batch-size", default=24, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("-j", "--workers", default=0, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--weight-decay", default=1e-4, type=float)
    parser.add_argument("--label-smoothing", default=0.1, type=float)
    parser.add_argument("--lr-warmup-epochs", default=1, type=int)
    parser.add_argument("--clip-grad-norm", default=1.0, type=float)
    parser.add_argument("--model-ema-steps", default=2, type=int)
    parser.add_argument("--mixup", default=True, type=bool)
    parser.add_argument("--print-freq", default=4, type=int)
    parser.add_argument("--output-dir", default="references_output")
    parser.add_argument("--seed", default=7, type=int)
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
