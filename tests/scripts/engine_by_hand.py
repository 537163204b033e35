"""Engine with events and handlers, as ignite's: a process function, metrics that are attached, checkpoints and stopping."""

import enum
import heapq
import logging
import os
from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Events(enum.Enum):
    STARTED = "started"
    EPOCH_STARTED = "epoch_started"
    ITERATION_COMPLETED = "iteration_completed"
    EPOCH_COMPLETED = "epoch_completed"
    COMPLETED = "completed"


class Engine:
    """Runs a function for each batch and calls handlers at events."""

    def __init__(self, process):
        self.process = process
        self.handlers = defaultdict(list)
        self.state = SimpleNamespace(epoch=0, iteration=0, output=None, metrics={}, max_epochs=0)
        self.should_terminate = False

    def on(self, event, every=1):
        def decorate(handler):
            self.add_event_handler(event, handler, every=every)
            return handler

        return decorate

    def add_event_handler(self, event, handler, *args, every=1):
        self.handlers[event].append((handler, args, every))

    def fire(self, event):
        count = self.state.iteration if event is Events.ITERATION_COMPLETED else self.state.epoch
        for handler, args, every in self.handlers[event]:
            if count % every == 0:
                handler(self, *args)

    def terminate(self):
        self.should_terminate = True

    def run(self, data, max_epochs=1):
        self.should_terminate = False
        self.state.epoch = self.state.iteration = 0
        self.state.max_epochs = max_epochs
        self.fire(Events.STARTED)
        while self.state.epoch < max_epochs and not self.should_terminate:
            self.state.epoch += 1
            self.fire(Events.EPOCH_STARTED)
            for batch in data:
                self.state.iteration += 1
                self.state.output = self.process(self, batch)
                self.fire(Events.ITERATION_COMPLETED)
                if self.should_terminate:
                    break
            self.fire(Events.EPOCH_COMPLETED)
        self.fire(Events.COMPLETED)
        return self.state


class Metric:
    """Mean over samples of a function of (predictions, targets)."""

    def __init__(self, function):
        self.function = function

    def attach(self, engine, name):
        engine.add_event_handler(Events.EPOCH_STARTED, self.reset)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.update)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self.compute, name)

    def reset(self, engine):
        self.sum = torch.zeros(())
        self.count = 0

    def update(self, engine):
        predictions, targets = engine.state.output
        values = self.function(predictions, targets)
        self.sum = self.sum + values.sum()
        self.count += len(values)

    def compute(self, engine, name):
        engine.state.metrics[name] = (self.sum / self.count).item()


class Checkpoint:
    """Keeps the files of the best scores."""

    def __init__(self, objects, folder, keep=2):
        self.objects = objects
        self.folder = folder
        self.keep = keep
        self.saved = []
        os.makedirs(folder, exist_ok=True)

    def __call__(self, evaluator, trainer):
        score = -evaluator.state.metrics["loss"]
        path = os.path.join(self.folder, f"epoch_{trainer.state.epoch}_loss={-score:.4f}.pt")
        if len(self.saved) == self.keep and score <= self.saved[0][0]:
            return
        torch.save({name: value.state_dict() for name, value in self.objects.items()}, path)
        heapq.heappush(self.saved, (score, path))
        if len(self.saved) > self.keep:
            os.remove(heapq.heappop(self.saved)[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(2, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 5, stride=2), nn.ReLU()
        )
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.1)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        hidden = self.features(x).transpose(1, 2)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(hidden.mean(dim=1))


def make_data(count):
    kinds = torch.randint(0, 3, (count,))
    time = torch.linspace(0, 6, 40)
    phases = 2 * torch.rand(count, 1)
    first = torch.sin((kinds + 1).unsqueeze(1) * time + phases)
    signals = torch.stack([first, first.roll(5, dims=1)], dim=1) + 0.5 * torch.randn(count, 2, 40)
    return TensorDataset(signals, kinds)


def main():
    torch.manual_seed(12)
    logging.basicConfig(
        level=logging.INFO,
        format="%(name)s: %(message)s",
        force=True,
        handlers=[logging.FileHandler("engine.log", mode="w")],
    )
    log = logging.getLogger("engine")
    train_loader = DataLoader(make_data(160), batch_size=32, shuffle=True)
    val_loader = DataLoader(make_data(60), batch_size=32)
    model = Net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def train_step(engine, batch):
        model.train()
        x, y = batch
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def eval_step(engine, batch):
        model.eval()
        with torch.no_grad():
            return model(batch[0]), batch[1]

    trainer = Engine(train_step)
    evaluator = Engine(eval_step)
    Metric(lambda p, t: (p.argmax(dim=1) == t).to(p.dtype)).attach(evaluator, "accuracy")
    Metric(lambda p, t: nn.functional.cross_entropy(p, t, reduction="none")).attach(evaluator, "loss")
    checkpoint = Checkpoint({"model": model, "optimizer": optimizer}, "engine_checkpoints")
    evaluator.add_event_handler(Events.COMPLETED, checkpoint, trainer)
    best = {"loss": float("inf"), "bad": 0}

    @trainer.on(Events.ITERATION_COMPLETED, every=2)
    def log_loss(engine):
        print(f"[{engine.state.epoch}, {engine.state.iteration}] loss {engine.state.output:.4f}")

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        metrics = evaluator.run(val_loader).metrics
        log.info("epoch %d accuracy %.4f", engine.state.epoch, metrics["accuracy"])
        print(f"epoch {engine.state.epoch}: accuracy {metrics['accuracy']:.4f} loss {metrics['loss']:.4f}")

    @trainer.on(Events.EPOCH_COMPLETED)
    def stop_early(engine):
        loss = evaluator.state.metrics["loss"]
        best["bad"] = 0 if loss < best["loss"] else best["bad"] + 1
        best["loss"] = min(loss, best["loss"])
        if best["bad"] >= 2:
            engine.terminate()

    state = trainer.run(train_loader, max_epochs=5)
    print("epochs", state.epoch, "iterations", state.iteration, "kept", len(os.listdir("engine_checkpoints")))
    score, path = max(checkpoint.saved)
    model.load_state_dict(torch.load(path)["model"])
    print(f"best {-score:.4f} again {evaluator.run(val_loader).metrics['loss']:.4f}")
    with open("engine.log") as file:
        print(len(file.readlines()), "lines of the log")


if __name__ == "__main__":
    main()
