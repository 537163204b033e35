"""Detection and masks in two stages (Mask R-CNN) on lists of images of different sizes."""

import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.ops import box_iou, masks_to_boxes
from torchvision.transforms import v2 as T


class ShapesDataset(Dataset):
    """Squares (class 1) and discs (class 2) on noise; heights and widths of the images differ."""

    def __init__(self, count, transforms=None, seed=0):
        self.rng = np.random.RandomState(seed)
        self.transforms = transforms
        self.items = [self._draw() for _ in range(count)]

    def _draw(self):
        height, width = self.rng.randint(48, 73, 2)
        rows, columns = np.mgrid[0:height, 0:width]
        image = self.rng.uniform(0, 0.2, (3, height, width))
        masks, labels = [], []
        for _ in range(self.rng.randint(1, 4)):
            radius = self.rng.randint(6, 11)
            y = self.rng.randint(radius, height - radius)
            x = self.rng.randint(radius, width - radius)
            label = self.rng.randint(1, 3)
            if label == 1:
                mask = np.maximum(abs(rows - y), abs(columns - x)) <= radius
            else:
                mask = (rows - y) ** 2 + (columns - x) ** 2 <= radius**2
            image[label, mask] = self.rng.uniform(0.7, 1)
            masks.append(mask)
            labels.append(label)
        return image, np.stack(masks), labels

    def __len__(self):
        return len(self.items)

    def __getitem__(self, idx):
        image, masks, labels = self.items[idx]
        masks = torch.as_tensor(masks, dtype=torch.uint8)
        boxes = masks_to_boxes(masks)
        boxes[:, 2:] += 1
        target = {
            "boxes": boxes.to(torch.get_default_dtype()),
            "labels": torch.tensor(labels),
            "masks": masks,
            "image_id": idx,
            "area": (boxes[:, 3] - boxes[:, 1]) * (boxes[:, 2] - boxes[:, 0]),
            "iscrowd": torch.zeros((len(labels),), dtype=torch.int64),
        }
        image = torch.Tensor(image)
        if self.transforms is not None:
            image = self.transforms(image)
        return image, target


def collate_fn(batch):
    return tuple(zip(*batch))


def conv(inputs, outputs, stride):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def encode(reference, proposals):
    """Offsets of boxes to proposals, in the units of the proposals."""
    size = proposals[:, 2:] - proposals[:, :2]
    centre = proposals[:, :2] + size / 2
    wanted = reference[:, 2:] - reference[:, :2]
    return torch.cat([(reference[:, :2] + wanted / 2 - centre) / size, torch.log(wanted / size)], dim=1)


def decode(offsets, proposals):
    size = proposals[:, 2:] - proposals[:, :2]
    centre = proposals[:, :2] + size / 2 + offsets[:, :2] * size
    half = size * torch.exp(offsets[:, 2:].clamp(max=2)) / 2
    return torch.cat([centre - half, centre + half], dim=1)


def non_maximum_suppression(boxes, scores, threshold, limit):
    keep = []
    order = scores.argsort(descending=True)
    while len(order) and len(keep) < limit:
        best = order[0]
        keep.append(best)
        iou = box_iou(boxes[best][None], boxes[order[1:]])[0]
        order = order[1:][iou <= threshold]
    return torch.stack(keep)


def crop(maps, boxes, size, scale):
    """Bilinear samples [boxes, channels, size, size] of maps [channels, height, width] within boxes."""
    height, width = maps.shape[-2:]
    steps = (torch.arange(size, device=maps.device) + 0.5) / size
    x = (boxes[:, :1] + (boxes[:, 2:3] - boxes[:, :1]) * steps) * scale / width * 2 - 1
    y = (boxes[:, 1:2] + (boxes[:, 3:] - boxes[:, 1:2]) * steps) * scale / height * 2 - 1
    grid = torch.stack([x[:, None].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], dim=-1)
    return F.grid_sample(maps[None].expand(len(boxes), -1, -1, -1), grid, align_corners=False)


def sample(labels, count, positive_fraction):
    """Indices of random positive and negative rows; rows with label -1 are left out."""
    positive = torch.where(labels >= 1)[0]
    negative = torch.where(labels == 0)[0]
    num_pos = min(len(positive), int(count * positive_fraction))
    num_neg = min(len(negative), count - num_pos)
    return torch.cat(
        [positive[torch.randperm(len(positive))[:num_pos]], negative[torch.randperm(len(negative))[:num_neg]]]
    )


class RegionProposalNetwork(nn.Module):
    def __init__(self, channels, sizes=(12, 18, 24), stride=8):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())
        self.cls_logits = nn.Conv2d(channels, len(sizes), 1)
        self.bbox_pred = nn.Conv2d(channels, len(sizes) * 4, 1)
        self.sizes = sizes
        self.stride = stride

    def anchors(self, features):
        height, width = features.shape[-2:]
        ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres = (torch.stack([xs, ys], dim=-1).reshape(-1, 1, 2) + 0.5) * self.stride
        half = torch.tensor(self.sizes).view(1, -1, 1) / 2
        return torch.cat([centres - half, centres + half], dim=-1).reshape(-1, 4).to(features)

    def forward(self, features, image_sizes, targets=None):
        hidden = self.conv(features)
        n = len(features)
        logits = self.cls_logits(hidden).permute(0, 2, 3, 1).reshape(n, -1)
        offsets = self.bbox_pred(hidden).permute(0, 2, 3, 1).reshape(n, -1, 4)
        anchors = self.anchors(features)
        proposals = []
        for scores, moved, (height, width) in zip(logits.detach(), offsets.detach(), image_sizes):
            top = scores.topk(40).indices
            boxes = decode(moved[top], anchors[top])
            boxes = torch.stack([boxes[:, i].clamp(0, limit) for i, limit in enumerate((width, height) * 2)], dim=1)
            large = ((boxes[:, 2:] - boxes[:, :2]) > 1).all(dim=1)
            boxes, scores = boxes[large], scores[top][large]
            proposals.append(boxes[non_maximum_suppression(boxes, scores, 0.7, 12)])
        if targets is None:
            return proposals, {}

        objectness, regression, count = 0, 0, 0
        for scores, moved, target in zip(logits, offsets, targets):
            iou = box_iou(target["boxes"], anchors)
            best, match = iou.max(dim=0)
            labels = torch.where(best >= 0.5, 1, torch.where(best < 0.3, 0, -1))
            labels[iou.argmax(dim=1)] = 1
            rows = sample(labels, 32, 0.5)
            positive = rows[labels[rows] == 1]
            wanted = encode(target["boxes"][match[positive]], anchors[positive])
            objectness = objectness + F.binary_cross_entropy_with_logits(
                scores[rows], labels[rows].to(scores), reduction="sum"
            )
            regression = regression + F.smooth_l1_loss(moved[positive], wanted, beta=1 / 9, reduction="sum")
            count += len(rows)
        return proposals, {"loss_objectness": objectness / count, "loss_rpn_box_reg": regression / count}


class RoIHeads(nn.Module):
    def __init__(self, channels, num_classes, scale=1 / 8):
        super().__init__()
        self.num_classes = num_classes
        self.scale = scale
        self.box_head = nn.Sequential(nn.Flatten(), nn.Linear(channels * 25, 48), nn.ReLU())
        self.cls_score = nn.Linear(48, num_classes)
        self.bbox_pred = nn.Linear(48, num_classes * 4)
        self.mask_head = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 16, 2, 2),
            nn.ReLU(),
            nn.Conv2d(16, num_classes, 1),
        )

    def pool(self, features, boxes, size):
        return torch.cat([crop(maps, own, size, self.scale) for maps, own in zip(features, boxes)])

    @torch.no_grad()
    def select_training_samples(self, proposals, targets):
        boxes, labels, matches = [], [], []
        for own, target in zip(proposals, targets):
            own = torch.cat([own, target["boxes"]])
            best, match = box_iou(target["boxes"], own).max(dim=0)
            label = torch.where(best >= 0.5, target["labels"][match], 0)
            rows = sample(label, 16, 0.5)
            boxes.append(own[rows])
            labels.append(label[rows])
            matches.append(match[rows])
        return boxes, labels, matches

    def forward(self, features, proposals, targets=None):
        if targets is not None:
            proposals, labels, matches = self.select_training_samples(proposals, targets)
        hidden = self.box_head(self.pool(features, proposals, 5))
        logits, offsets = self.cls_score(hidden), self.bbox_pred(hidden).view(-1, self.num_classes, 4)
        if targets is None:
            return self.detect(features, proposals, logits, offsets), {}

        wanted = torch.cat([encode(t["boxes"][m], p) for t, m, p in zip(targets, matches, proposals)])
        flat = torch.cat(labels)
        positive = torch.where(flat > 0)[0]
        box_loss = F.smooth_l1_loss(offsets[positive, flat[positive]], wanted[positive], reduction="sum") / len(flat)
        mask_boxes = [p[own > 0] for p, own in zip(proposals, labels)]
        mask_logits = self.mask_head(self.pool(features, mask_boxes, 8))
        mask_targets = []
        for own, label, match, target in zip(mask_boxes, labels, matches, targets):
            masks = target["masks"][match[label > 0]].to(own)
            mask_targets += [crop(mask[None], box[None], 16, 1.0)[0] for mask, box in zip(masks, own)]
        mask_loss = F.binary_cross_entropy_with_logits(
            mask_logits[torch.arange(len(positive)), flat[positive]], torch.cat(mask_targets)
        )
        return [], {"loss_classifier": F.cross_entropy(logits, flat), "loss_box_reg": box_loss, "loss_mask": mask_loss}

    def detect(self, features, proposals, logits, offsets):
        counts = [len(own) for own in proposals]
        results = []
        for i, (own, scores, moved) in enumerate(
            zip(proposals, logits.softmax(-1).split(counts), offsets.split(counts))
        ):
            best, label = scores[:, 1:].max(dim=1)
            boxes = decode(moved[torch.arange(len(own)), label + 1], own)
            keep = non_maximum_suppression(boxes, best, 0.5, 4)
            masks = self.mask_head(self.pool(features[i : i + 1], [boxes[keep]], 8)).sigmoid()
            masks = masks[torch.arange(len(keep)), label[keep] + 1]
            results.append({"boxes": boxes[keep], "labels": label[keep] + 1, "scores": best[keep], "masks": masks})
        return results


class MaskRCNN(nn.Module):
    """Losses of lists of images [3, height, width] and targets in training; a list of detections otherwise."""

    def __init__(self, num_classes):
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 8, 2), conv(8, 16, 2), conv(16, 24, 2))
        self.rpn = RegionProposalNetwork(24)
        self.roi_heads = RoIHeads(24, num_classes)

    def batch_images(self, images):
        shape = [-(-max(image.shape[i] for image in images) // 8) * 8 for i in (1, 2)]
        batch = images[0].new_zeros(len(images), 3, *shape)
        for image, pad in zip(images, batch):
            pad[:, : image.shape[1], : image.shape[2]].copy_((image - 0.3) / 0.3)
        return batch

    def forward(self, images, targets=None):
        if self.training and targets is None:
            raise ValueError("targets are needed in training")
        own = targets if self.training else None
        features = self.backbone(self.batch_images(images))
        proposals, proposal_losses = self.rpn(features, [image.shape[-2:] for image in images], own)
        detections, detector_losses = self.roi_heads(features, proposals, own)
        if self.training:
            return {**detector_losses, **proposal_losses}
        return detections


def train_one_epoch(model, optimizer, data_loader, device, epoch, print_freq):
    model.train()
    lr_scheduler = None
    if epoch == 0:
        warmup_iters = min(1000, len(data_loader) - 1)
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warmup_iters)

    for step, (images, targets) in enumerate(data_loader):
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            print(loss_dict)
            sys.exit(1)

        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        if step % print_freq == 0:
            parts = "  ".join(f"{name}: {value.item():.4f}" for name, value in loss_dict.items())
            print(f"Epoch: [{epoch}]  [{step}/{len(data_loader)}]  loss: {loss_value:.4f}  {parts}")


@torch.inference_mode()
def evaluate(model, data_loader, device):
    model.eval()
    best = []
    for images, targets in data_loader:
        outputs = model([image.to(device) for image in images])
        for target, output in zip(targets, outputs):
            iou = box_iou(target["boxes"], output["boxes"].cpu())
            best += iou.max(dim=1).values.tolist()
    print(f"Test:  {len(best)} objects, mean of the best IoU: {np.mean(best):.4f}")


def main():
    torch.manual_seed(1)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    num_classes = 3
    dataset = ShapesDataset(38, T.Compose([T.ColorJitter(brightness=0.2)]))
    dataset_test = ShapesDataset(38)
    indices = torch.randperm(len(dataset)).tolist()
    dataset = Subset(dataset, indices[:-12])
    dataset_test = Subset(dataset_test, indices[-12:])
    data_loader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate_fn)
    data_loader_test = DataLoader(dataset_test, batch_size=2, shuffle=False, collate_fn=collate_fn)

    model = MaskRCNN(num_classes).to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.0005)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(2):
        train_one_epoch(model, optimizer, data_loader, device, epoch, print_freq=2)
        lr_scheduler.step()
        evaluate(model, data_loader_test, device)
    torch.save(model.state_dict(), "mask_rcnn.pth")
    print("That's it!")


if __name__ == "__main__":
    main()
