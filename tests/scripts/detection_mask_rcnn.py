"""Detection and masks with torchvision's Mask R-CNN on lists of images of different sizes."""

import math
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign, box_iou, masks_to_boxes
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


def get_model(num_classes):
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(),
    )
    backbone.out_channels = 24
    return MaskRCNN(
        backbone,
        num_classes=num_classes,
        min_size=56,
        max_size=84,
        rpn_anchor_generator=AnchorGenerator(sizes=((12, 18, 24),), aspect_ratios=((0.8, 1.0, 1.25),)),
        rpn_pre_nms_top_n_train=60,
        rpn_pre_nms_top_n_test=40,
        rpn_post_nms_top_n_train=20,
        rpn_post_nms_top_n_test=20,
        rpn_batch_size_per_image=32,
        box_batch_size_per_image=16,
        box_detections_per_img=4,
        box_score_thresh=0.0,
        box_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=5, sampling_ratio=2),
        box_head=nn.Sequential(nn.Flatten(), nn.Linear(24 * 25, 48), nn.ReLU()),
        box_predictor=BoxPredictor(48, num_classes),
        mask_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=8, sampling_ratio=2),
        mask_head=MaskRCNNHeads(24, (16, 16), 1),
        mask_predictor=nn.Sequential(nn.ConvTranspose2d(16, 16, 2, 2), nn.ReLU(), nn.Conv2d(16, num_classes, 1)),
    )


class BoxPredictor(nn.Module):
    def __init__(self, in_channels, num_classes):
        super().__init__()
        self.cls_score = nn.Linear(in_channels, num_classes)
        self.bbox_pred = nn.Linear(in_channels, num_classes * 4)

    def forward(self, x):
        return self.cls_score(x), self.bbox_pred(x)


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
            assert output["masks"].shape[1:] == (1, *target["masks"].shape[1:])
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

    model = get_model(num_classes).to(device)
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
