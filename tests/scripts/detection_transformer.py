"""Detection as a set: a transformer with queries, a bipartite matching and losses over the matched pairs."""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import box_convert, generalized_box_iou

try:
    from scipy.optimize import linear_sum_assignment
except ImportError:

    def linear_sum_assignment(cost):
        """Greedy: the cheapest free pair first."""
        cost = torch.as_tensor(cost).clone()
        pairs = []
        for _ in range(min(cost.shape)):
            row, column = divmod(int(cost.argmin()), cost.shape[1])
            pairs.append((row, column))
            cost[row] = float("inf")
            cost[:, column] = float("inf")
        pairs.sort()
        return [row for row, _ in pairs], [column for _, column in pairs]


class Rectangles(Dataset):
    """Images with one to four bright rectangles; the class is the channel. Sizes of images differ."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(count):
            h, w = torch.randint(40, 65, (2,), generator=generator).tolist()
            image = 0.1 * torch.randn(3, h, w, generator=generator)
            boxes, labels = [], []
            for _ in range(int(torch.randint(1, 5, (1,), generator=generator))):
                bh, bw = torch.randint(8, 18, (2,), generator=generator).tolist()
                y = int(torch.randint(0, h - bh, (1,), generator=generator))
                x = int(torch.randint(0, w - bw, (1,), generator=generator))
                label = int(torch.randint(0, 3, (1,), generator=generator))
                image[label, y : y + bh, x : x + bw] += 1
                boxes.append([(x + bw / 2) / w, (y + bh / 2) / h, bw / w, bh / h])
                labels.append(label)
            self.items.append((image, {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels)}))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate_fn(batch):
    """Images padded to the largest, masks of the padding, and the list of targets."""
    images, targets = zip(*batch)
    height = max(image.shape[1] for image in images)
    width = max(image.shape[2] for image in images)
    padded = torch.zeros(len(images), 3, height, width)
    mask = torch.ones(len(images), height, width, dtype=torch.bool)
    for image, pad, m in zip(images, padded, mask):
        pad[:, : image.shape[1], : image.shape[2]].copy_(image)
        m[: image.shape[1], : image.shape[2]] = False
    return padded, mask, targets


class PositionEmbedding(nn.Module):
    def __init__(self, num_pos_feats):
        super().__init__()
        self.num_pos_feats = num_pos_feats

    def forward(self, mask):
        not_mask = ~mask
        y_embed = not_mask.cumsum(1) / (not_mask.sum(1, keepdim=True) + 1e-6) * 6.28
        x_embed = not_mask.cumsum(2) / (not_mask.sum(2, keepdim=True) + 1e-6) * 6.28
        frequencies = 2.0 ** torch.arange(self.num_pos_feats // 2, device=mask.device)
        parts = [e[..., None] * frequencies for e in (y_embed, x_embed)]
        return torch.cat([f(part) for part in parts for f in (torch.sin, torch.cos)], dim=-1).flatten(1, 2)


class DETR(nn.Module):
    def __init__(self, num_classes, num_queries, hidden=32):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, hidden, 3, stride=2, padding=1),
        )
        self.position = PositionEmbedding(hidden // 2)
        encoder_layer = nn.TransformerEncoderLayer(hidden, 4, 64, dropout=0.1, batch_first=True)
        decoder_layer = nn.TransformerDecoderLayer(hidden, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder_layer, 1, enable_nested_tensor=False)
        self.decoder = nn.ModuleList([decoder_layer, nn.TransformerDecoderLayer(hidden, 4, 64, 0.1, batch_first=True)])
        self.query_embed = nn.Embedding(num_queries, hidden)
        self.class_embed = nn.Linear(hidden, num_classes + 1)
        self.bbox_embed = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def forward(self, images, mask):
        features = self.backbone(images)
        small = F.interpolate(mask[:, None].to(images.dtype), size=features.shape[-2:])[:, 0].to(torch.bool)
        memory = features.flatten(2).transpose(1, 2) + self.position(small)
        padding = small.flatten(1)
        memory = self.encoder(memory, src_key_padding_mask=padding)
        hs = self.query_embed.weight.unsqueeze(0).expand(len(images), -1, -1)
        outputs = []
        for layer in self.decoder:
            hs = layer(hs, memory, memory_key_padding_mask=padding)
            outputs.append({"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()})
        return {**outputs[-1], "aux_outputs": outputs[:-1]}


class HungarianMatcher(nn.Module):
    @torch.no_grad()
    def forward(self, outputs, targets):
        bs, num_queries = outputs["pred_logits"].shape[:2]
        out_prob = outputs["pred_logits"].flatten(0, 1).softmax(-1)
        out_bbox = outputs["pred_boxes"].flatten(0, 1)
        tgt_ids = torch.cat([v["labels"] for v in targets])
        tgt_bbox = torch.cat([v["boxes"] for v in targets])
        cost_class = -out_prob[:, tgt_ids]
        cost_bbox = torch.cdist(out_bbox, tgt_bbox, p=1)
        cost_giou = -generalized_box_iou(xyxy(out_bbox), xyxy(tgt_bbox))
        C = (5 * cost_bbox + cost_class + 2 * cost_giou).view(bs, num_queries, -1).cpu()
        sizes = [len(v["boxes"]) for v in targets]
        indices = [linear_sum_assignment(c[i]) for i, c in enumerate(C.split(sizes, -1))]
        return [(torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in indices]


def xyxy(boxes):
    return box_convert(boxes, "cxcywh", "xyxy")


class SetCriterion(nn.Module):
    def __init__(self, num_classes, matcher, weight_dict, eos_coef):
        super().__init__()
        self.num_classes = num_classes
        self.matcher = matcher
        self.weight_dict = weight_dict
        empty_weight = torch.ones(num_classes + 1)
        empty_weight[-1] = eos_coef
        self.register_buffer("empty_weight", empty_weight)

    def compute(self, outputs, targets, num_boxes):
        indices = self.matcher(outputs, targets)
        batch_idx = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
        idx = batch_idx, torch.cat([src for (src, _) in indices])

        src_logits = outputs["pred_logits"]
        target_classes_o = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, indices)])
        target_classes = torch.full(src_logits.shape[:2], self.num_classes, dtype=torch.int64, device=src_logits.device)
        target_classes[idx] = target_classes_o
        losses = {"loss_ce": F.cross_entropy(src_logits.transpose(1, 2), target_classes, self.empty_weight)}
        losses["class_error"] = 100 - 100 * (src_logits[idx].argmax(-1) == target_classes_o).sum() / len(
            target_classes_o
        )

        src_boxes = outputs["pred_boxes"][idx]
        target_boxes = torch.cat([t["boxes"][i] for t, (_, i) in zip(targets, indices)])
        losses["loss_bbox"] = F.l1_loss(src_boxes, target_boxes, reduction="none").sum() / num_boxes
        loss_giou = 1 - torch.diag(generalized_box_iou(xyxy(src_boxes), xyxy(target_boxes)))
        losses["loss_giou"] = loss_giou.sum() / num_boxes
        return losses

    def forward(self, outputs, targets):
        num_boxes = sum(len(t["labels"]) for t in targets)
        num_boxes = torch.clamp(torch.as_tensor([num_boxes]), min=1).item()
        losses = self.compute(outputs, targets, num_boxes)
        for i, aux_outputs in enumerate(outputs["aux_outputs"]):
            losses.update({f"{k}_{i}": v for k, v in self.compute(aux_outputs, targets, num_boxes).items()})
        return losses


def get_args_parser():
    parser = argparse.ArgumentParser("Detection transformer", add_help=False)
    parser.add_argument("--lr", default=1e-3, type=float)
    parser.add_argument("--lr_backbone", default=3e-4, type=float)
    parser.add_argument("--batch_size", default=16, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--clip_max_norm", default=0.1, type=float)
    parser.add_argument("--num_queries", default=8, type=int)
    parser.add_argument("--output_dir", default="detr_output")
    parser.add_argument("--seed", default=42, type=int)
    return parser


def total(loss_dict, weight_dict):
    return sum(loss_dict[k] * weight_dict[k] for k in loss_dict if k in weight_dict)


def main(args):
    torch.manual_seed(args.seed)
    model = DETR(3, args.num_queries)
    weight_dict = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
    weight_dict.update({f"{k}_0": v for k, v in weight_dict.items()})
    criterion = SetCriterion(3, HungarianMatcher(), weight_dict, eos_coef=0.1)
    param_dicts = [
        {"params": [p for n, p in model.named_parameters() if "backbone" not in n]},
        {"params": [p for n, p in model.named_parameters() if "backbone" in n], "lr": args.lr_backbone},
    ]
    optimizer = torch.optim.AdamW(param_dicts, lr=args.lr, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train_loader = DataLoader(Rectangles(90, 0), args.batch_size, shuffle=True, collate_fn=collate_fn)
    val_loader = DataLoader(Rectangles(22, 1), args.batch_size, collate_fn=collate_fn)
    output_dir = Path(args.output_dir)
    output_dir.mkdir(exist_ok=True)

    print("Start training")
    for epoch in range(args.epochs):
        model.train()
        criterion.train()
        for step, (images, mask, targets) in enumerate(train_loader):
            loss_dict = criterion(model(images, mask), targets)
            losses = total(loss_dict, weight_dict)
            optimizer.zero_grad()
            losses.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_max_norm)
            optimizer.step()
            if step % 2 == 0:
                parts = "  ".join(f"{k}: {loss_dict[k].item():.4f}" for k in ("loss_ce", "loss_bbox", "loss_giou"))
                print(f"Epoch: [{epoch}]  [{step}/{len(train_loader)}]  loss: {losses.item():.4f}  {parts}")
        lr_scheduler.step()

        model.eval()
        criterion.eval()
        with torch.no_grad():
            results = [criterion(model(images, mask), targets) for images, mask, targets in val_loader]
        test_stats = {k: sum(r[k].item() for r in results) / len(results) for k in ("loss_ce", "class_error")}
        print(f"Test:  {json.dumps({k: round(v, 4) for k, v in test_stats.items()})}")
        torch.save({"model": model.state_dict(), "epoch": epoch}, output_dir / "checkpoint.pth")
        with (output_dir / "log.txt").open("a" if epoch else "w") as f:
            f.write(json.dumps({"epoch": epoch, **test_stats}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("Training of the detection transformer", parents=[get_args_parser()])
    main(parser.parse_args())
