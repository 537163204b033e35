"""Training with timm: model, optimizer, schedule, mixup, EMA of weights and checkpoints of the library."""

import argparse
import logging
import os
import sys
from collections import OrderedDict

import torch
import torch.nn as nn
from timm import create_model, utils
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import FakeData

_logger = logging.getLogger("train")

parser = argparse.ArgumentParser(description="Image classifiers of timm")
parser.add_argument("--model", default="test_efficientnet", type=str)
parser.add_argument("--num-classes", type=int, default=6)
parser.add_argument("--img-size", type=int, default=48)
parser.add_argument("-b", "--batch-size", type=int, default=26)
parser.add_argument("-vb", "--validation-batch-size", type=int, default=32)
parser.add_argument("--opt", default="adamw", type=str)
parser.add_argument("--weight-decay", type=float, default=0.05)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--sched", type=str, default="cosine")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--warmup-lr", type=float, default=1e-4)
parser.add_argument("--min-lr", type=float, default=1e-5)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--mixup", type=float, default=0.4)
parser.add_argument("--cutmix", type=float, default=1.0)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--drop", type=float, default=0.1)
parser.add_argument("--drop-path", type=float, default=0.1)
parser.add_argument("--model-ema-decay", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=2)
parser.add_argument("--output", default="timm_output", type=str)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, device, lr_scheduler, mixup_fn, model_ema):
    model.train()
    losses_m = utils.AverageMeter()
    num_updates = epoch * len(loader)
    for batch_idx, (input, target) in enumerate(loader):
        input, target = input.to(device), target.to(device)
        if mixup_fn is not None:
            input, target = mixup_fn(input, target)
        output = model(input)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad is not None:
            utils.dispatch_clip_grad(model.parameters(), value=args.clip_grad)
        optimizer.step()
        num_updates += 1
        if model_ema is not None:
            model_ema.update(model)
        losses_m.update(loss.item(), input.size(0))
        if batch_idx % args.log_interval == 0:
            lr = sum(param_group["lr"] for param_group in optimizer.param_groups) / len(optimizer.param_groups)
            _logger.info(
                f"Train: {epoch} [{batch_idx:>4d}/{len(loader)}]  "
                f"Loss: {losses_m.val:#.4g} ({losses_m.avg:#.3g})  LR: {lr:.3e}"
            )
        lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
    return OrderedDict([("loss", losses_m.avg)])


def validate(model, loader, loss_fn, device, log_suffix=""):
    losses_m = utils.AverageMeter()
    top1_m = utils.AverageMeter()
    top5_m = utils.AverageMeter()
    model.eval()
    with torch.no_grad():
        for input, target in loader:
            input, target = input.to(device), target.to(device)
            output = model(input)
            loss = loss_fn(output, target)
            acc1, acc5 = utils.accuracy(output, target, topk=(1, 5))
            losses_m.update(loss.item(), input.size(0))
            top1_m.update(acc1.item(), output.size(0))
            top5_m.update(acc5.item(), output.size(0))
    _logger.info(f"Test{log_suffix}: Loss: {losses_m.avg:>7.3f}  Acc@1: {top1_m.avg:>7.3f}  Acc@5: {top5_m.avg:>7.3f}")
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg), ("top5", top5_m.avg)])


def main():
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    utils.random_seed(args.seed, 0)

    model = create_model(
        args.model, pretrained=False, num_classes=args.num_classes, drop_rate=args.drop, drop_path_rate=args.drop_path
    )
    model.to(device)
    _logger.info(f"Model {args.model} created, param count: {sum(m.numel() for m in model.parameters())}")
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=args.weight_decay)
    model_ema = utils.ModelEmaV3(model, decay=args.model_ema_decay)

    normalize = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    train_transform = transforms.Compose(
        [transforms.RandomCrop(args.img_size), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
    )
    eval_transform = transforms.Compose([transforms.CenterCrop(args.img_size), transforms.ToTensor(), normalize])
    size = (3, args.img_size + 8, args.img_size + 8)
    dataset_train = FakeData(135, size, args.num_classes, train_transform)
    dataset_eval = FakeData(70, size, args.num_classes, eval_transform, random_offset=135)
    loader_train = DataLoader(dataset_train, batch_size=args.batch_size, shuffle=True, drop_last=True)
    loader_eval = DataLoader(dataset_eval, batch_size=args.validation_batch_size)

    mixup_fn = Mixup(
        mixup_alpha=args.mixup, cutmix_alpha=args.cutmix, label_smoothing=args.smoothing, num_classes=args.num_classes
    )
    train_loss_fn = SoftTargetCrossEntropy().to(device)
    validate_loss_fn = nn.CrossEntropyLoss().to(device)

    output_dir = utils.get_outdir(args.output, args.model)
    saver = utils.CheckpointSaver(
        model=model, optimizer=optimizer, args=args, model_ema=model_ema, checkpoint_dir=output_dir, max_history=2
    )
    lr_scheduler, num_epochs = create_scheduler_v2(
        optimizer,
        sched=args.sched,
        num_epochs=args.epochs,
        warmup_epochs=args.warmup_epochs,
        warmup_lr=args.warmup_lr,
        min_lr=args.min_lr,
        step_on_epochs=False,
        updates_per_epoch=len(loader_train),
    )
    _logger.info(f"Scheduled epochs: {num_epochs}.")

    best_metric, best_epoch = None, None
    for epoch in range(num_epochs):
        train_metrics = train_one_epoch(
            epoch, model, loader_train, optimizer, train_loss_fn, args, device, lr_scheduler, mixup_fn, model_ema
        )
        validate(model, loader_eval, validate_loss_fn, device)
        eval_metrics = validate(model_ema, loader_eval, validate_loss_fn, device, log_suffix=" (EMA)")
        utils.update_summary(
            epoch,
            train_metrics,
            eval_metrics,
            filename=os.path.join(output_dir, "summary.csv"),
            lr=optimizer.param_groups[0]["lr"],
            write_header=epoch == 0,
        )
        best_metric, best_epoch = saver.save_checkpoint(epoch, metric=eval_metrics["top1"])
        lr_scheduler.step(epoch + 1, eval_metrics["top1"])
    if best_metric is not None:
        _logger.info(f"*** Best metric: {best_metric:.3f} (epoch {best_epoch})")


if __name__ == "__main__":
    main()
