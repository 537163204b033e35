"""Losses that compare the samples of a whole batch: `StepConfig(gather="global")`."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import samestep
from own_loops.cases import Setting, digest, refused, same
from own_loops.modes import Points


class Views(Points):
    """Two random views of each point, and its class."""

    def __getitem__(self, index: int) -> Any:
        point, target = super().__getitem__(index)
        return (point + 0.1 * torch.randn(6), point + 0.1 * torch.randn(6)), target


class Encoder(nn.Module):
    """Features of one or several views, with dropout and, by choice, batch norm."""

    def __init__(self, norm: bool = False, drop: float = 0.2) -> None:
        super().__init__()
        layers = [nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(drop)]
        self.net = nn.Sequential(*layers, nn.Linear(16, 8))

    def forward(self, *views: torch.Tensor) -> Any:
        features = tuple(functional.normalize(self.net(view), dim=1) for view in views)
        return features if len(features) > 1 else features[0]


class Clip(nn.Module):
    """Two towers and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "image": functional.normalize(self.image(image), dim=1),
            "text": functional.normalize(self.text(text), dim=1),
            "scale": self.logit_scale.exp(),
        }


def info_nce(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    features = torch.cat(outputs)
    logits = (features @ features.T / 0.5).fill_diagonal_(-math.inf)
    return functional.cross_entropy(logits, torch.arange(len(features)).roll(len(features) // 2))


def clip_loss(outputs: Mapping[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    logits = outputs["scale"] * outputs["image"] @ outputs["text"].T
    numbers = torch.arange(len(logits))
    return (functional.cross_entropy(logits, numbers) + functional.cross_entropy(logits.T, numbers)) / 2


def supervised_contrastive(features: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
    """Return the loss of Khosla et al., "Supervised Contrastive Learning" (2020), over anchors with positives."""
    itself = torch.eye(len(features), dtype=torch.bool)
    logits = (features @ features.T / 0.5).masked_fill(itself, -1e9)
    positives = (targets[:, None] == targets) & ~itself
    shares = functional.log_softmax(logits, dim=1).masked_fill(~positives, 0).sum(1) / positives.sum(1).clamp(min=1)
    return samestep.Loss(-shares.sum(), positives.any(1).sum().clamp(min=1))


def engine_of(setting: Setting, model: nn.Module, loss: Any, **options: Any) -> samestep.Engine:
    config = samestep.StepConfig(**{"gather": "global", **options.pop("config", {})})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    return samestep.Engine(model, optimizer, loss, world=setting.world, config=config, **options)


def batches_of(setting: Setting, dataset: Any, **options: Any) -> Any:
    """Return a loader with batches of 16 in 4 microbatches; the last batch has 2 samples, so ranks are idle."""
    options = {"batch_size": 16, "microbatches": 4, "shuffle": True, **options}
    return samestep.loader(dataset, world=setting.world, **options)


def train(setting: Setting, model: nn.Module, loss: Any, dataset: Any, **options: Any) -> Any:
    engine, batches = engine_of(setting, model, loss, **options), batches_of(setting, dataset)
    losses = [engine.step(batch).loss for _ in range(2) for batch in batches]
    return model, losses, engine.evaluate(batches_of(setting, dataset, shuffle=False))


def require_plain_result(setting: Setting, build: Callable[[], nn.Module], loss: Any, dataset: Any) -> Any:
    """Train with an engine and in a plain loop on one device, in float64, and compare the models."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build().double())
    engine = engine_of(setting, models[0], loss)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches_of(setting, dataset):
        losses.append(engine.step(batch).loss)
        samples = [dataset[int(index)] for index in batch.indices]
        inputs, targets = torch.utils.data.default_collate(samples)
        optimizer.zero_grad()
        value = loss(models[1](*inputs) if isinstance(inputs, list) else models[1](inputs), targets)
        value = value.sum / value.count if isinstance(value, samestep.Loss) else value
        value.backward()
        optimizer.step()
        assert abs(losses[-1] - float(value.detach())) < 1e-12
    for parameter, plain in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(parameter, plain, rtol=1e-11, atol=1e-13)
    return models[0], losses


class DoublePoints(Points):
    """Points in float64."""

    def __getitem__(self, index: int) -> Any:
        point, target = super().__getitem__(index)
        return point.double(), target


class DoublePairs(DoublePoints):
    """Pairs of a point and the same point in reverse order."""

    def __getitem__(self, index: int) -> Any:
        point, target = super().__getitem__(index)
        return (point, point.flip(0)), target


@same
def info_nce_equals_a_plain_loop(setting: Setting) -> Any:
    return require_plain_result(setting, lambda: Encoder(drop=0.0), info_nce, DoublePairs())


@same
def clip_with_a_learned_scale_equals_a_plain_loop(setting: Setting) -> Any:
    return require_plain_result(setting, Clip, clip_loss, DoublePairs())


@same
def supervised_contrastive_loss_equals_a_plain_loop(setting: Setting) -> Any:
    return require_plain_result(setting, lambda: Encoder(drop=0.0), supervised_contrastive, DoublePoints())


@same
def info_nce_of_random_views_with_dropout(setting: Setting) -> Any:
    return train(setting, Encoder(), info_nce, Views())


@same
def info_nce_with_batch_norm_of_the_whole_batch(setting: Setting) -> Any:
    """As SimCLR. The last batch has samples on two ranks only."""
    return train(setting, Encoder(norm=True), info_nce, Views(), config={"batch_norm": "sync"})


@same
def batch_norm_of_the_whole_batch_in_bf16_with_a_forward_function(setting: Setting) -> Any:
    engine = engine_of(setting, Encoder(norm=True), info_nce, config={"batch_norm": "sync", "precision": "bf16"})
    forward = lambda model, batch: {"outputs": model(*batch[0]), "targets": batch[1]}  # noqa: E731
    results = [engine.step(batch, forward=forward) for batch in batches_of(setting, Views())]
    return engine.model, [result.loss for result in results]


@refused("E_INCOMPATIBLE")
def batch_norm_of_one_sample(setting: Setting) -> Any:
    engine = engine_of(setting, Encoder(norm=True), info_nce, config={"batch_norm": "sync"})
    *_, last = batches_of(setting, Views(49))
    return engine.step(last)


@same
def fp16_with_loss_scaling(setting: Setting) -> Any:
    return train(setting, Clip(), clip_loss, Views(), config={"precision": "fp16"})


@same
def recomputed_activations(setting: Setting) -> Any:
    model, losses, values = train(setting, Encoder(norm=True), info_nce, Views(48), config={"recompute": ("net",)})
    torch.manual_seed(0)
    plain = train(setting, Encoder(norm=True), info_nce, Views(48))
    assert digest(model, losses, values) == digest(*plain)
    return model, losses


@same
def forward_function_with_values(setting: Setting) -> Any:
    class Named(Views):
        def __getitem__(self, index: int) -> Any:
            (first, second), target = super().__getitem__(index)
            return {"first": first, "second": second, "label": target}

    def forward(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch["first"], batch["second"])
        return {"outputs": outputs, "targets": batch["label"], "cosine": (outputs[0] * outputs[1]).sum(1).mean()}

    model = Encoder()
    engine = engine_of(setting, model, info_nce)
    results = [engine.step(batch, forward=forward) for batch in batches_of(setting, Named())]
    values = engine.evaluate(batches_of(setting, Named(), shuffle=False), forward=forward)
    return model, [(result.loss, result.values) for result in results], values


@same
def batches_of_two_loaders_with_equal_sizes(setting: Setting) -> Any:
    def forward(model: nn.Module, data: Any) -> Any:
        (first, targets), (second, _) = data
        return {"outputs": (model(first), model(second)), "targets": targets}

    engine = engine_of(setting, Encoder(), info_nce)
    pairs = zip(batches_of(setting, Points()), batches_of(setting, Points(), seed=1), strict=True)
    return engine.model, [engine.step(batches, forward=forward).loss for batches in pairs]


@same
def terms_of_the_whole_batch(setting: Setting) -> Any:
    loss = samestep.MultiLoss(
        [
            samestep.LossTerm("pairs", info_nce, "once"),
            samestep.LossTerm("size", lambda o, t: o[0].square().sum(), weight=0.1),
        ]
    )
    return train(setting, Encoder(), loss, Views())


@same
def number_of_microbatches_changes_only_rounding(setting: Setting) -> Any:
    losses = []
    for microbatches in (4, 8):
        torch.manual_seed(0)
        engine = engine_of(setting, Encoder(drop=0.0).double(), info_nce)
        batches = batches_of(setting, DoublePairs(), microbatches=microbatches)
        losses.append([engine.step(batch).loss for batch in batches])
    assert all(abs(one - other) < 1e-10 for one, other in zip(*losses, strict=True))
    return losses


@same
def all_samples_of_a_microbatch_are_unusable(setting: Setting) -> Any:
    class Damaged(Points):
        def __getitem__(self, index: int) -> Any:
            if 4 <= index < 8:
                raise samestep.errors.DataError("damaged", expected="a sample", fix="none")
            return super().__getitem__(index)

    engine = engine_of(setting, Encoder(), supervised_contrastive)
    batches = batches_of(setting, Damaged(), shuffle=False, bad_samples="skip")
    return engine.model, [(engine.step(batch).loss, engine.steps) for batch in batches]


# --- refused on every rank, also on those without samples ----------------------------------------------------------


def first_step(setting: Setting, model: nn.Module, loss: Any, dataset: Any, samples: int, **options: Any) -> Any:
    engine = engine_of(setting, model, loss)
    batch = next(iter(batches_of(setting, dataset, batch_size=samples, microbatches=4)))
    return engine.step(batch, **options)


class Stacked(Encoder):
    """Returns both views in one tensor, as loops on one device do."""

    def forward(self, *views: torch.Tensor) -> torch.Tensor:
        return torch.cat(super().forward(*views))


_calls = 0


@refused("E_BUFFER")
def counter_in_a_global_variable_beside_a_global_loss(setting: Setting) -> Any:
    class Annealed(Encoder):
        def forward(self, *views: torch.Tensor) -> Any:
            global _calls  # noqa: PLW0603
            _calls += 1
            return super().forward(*(view / (1 + _calls) for view in views))

    return first_step(setting, Annealed(), info_nce, Views(), 16)


@refused("E_SHAPE")
def views_of_a_batch_in_one_tensor(setting: Setting) -> Any:
    return first_step(setting, Stacked(), lambda o, t: info_nce(o.chunk(2), t), Views(), 16)


@refused("E_SHAPE")
def forward_function_that_computes_the_loss(setting: Setting) -> Any:
    def forward(model: nn.Module, batch: Any) -> Any:
        return info_nce(model(*batch[0]), batch[1])

    return first_step(setting, Encoder(), info_nce, Views(), 16, forward=forward)


@refused("E_SHAPE")
def outputs_of_unknown_type_in_a_small_dataset(setting: Setting) -> Any:
    class Wrapped(Encoder):
        def forward(self, *views: torch.Tensor) -> Any:
            return {"features": super().forward(*views), "set": {1}}

    engine = engine_of(setting, Wrapped(), lambda o, t: info_nce(o["features"], t))
    *_, last = batches_of(setting, Views())
    assert last.size == 2
    return engine.step(last)


@refused("E_LOSS")
def loss_that_is_no_scalar_in_a_small_dataset(setting: Setting) -> Any:
    engine = engine_of(setting, Encoder(), lambda o, t: o[0].sum(1))
    *_, last = batches_of(setting, Views())
    return engine.step(last)


@refused("E_NONFINITE")
def non_finite_features(setting: Setting) -> Any:
    class Broken(Points):
        def __getitem__(self, index: int) -> Any:
            point, target = super().__getitem__(index)
            return point if index != 9 else point * math.nan, target

    return first_step(setting, Encoder(), supervised_contrastive, Broken(16), 16)


@refused("E_UNUSED_PARAMETER")
def parameter_without_a_gradient(setting: Setting) -> Any:
    return first_step(setting, Clip(), lambda o, t: o["image"].square().sum(1).mean(), Views(), 16)
