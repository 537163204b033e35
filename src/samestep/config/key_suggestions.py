"""Suggestions for unknown names: of other tools for the same setting, or similar spellings."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

# Words of training tutorials, timm, PaddleViT, Lightning and Hugging Face for each key or option.
_WORDS = {
    "optimizer.options.lr": "lr learningrate baselr initlr initiallr lr0",
    "optimizer.options.momentum": "momentum",
    "optimizer.options.weight_decay": "wd weightdecay l2",
    "optimizer.options.betas": "betas optbetas adambetas",
    "optimizer.options.eps": "opteps adameps adamepsilon",
    "optimizer.name": "opt optim optimizer optimizername",
    "optimizer.layer_decay": "layerdecay layerlrdecay llrd",
    "model.name": "arch a model modelname modeltype backbone net network",
    "model.pretrained": "pretrained weights pretrainedweights pretrainedpath loadfrom finetune "
    "checkpointpath",
    "model.freeze_except": "freezelayers freezebackbone featureextract",
    "loss.name": "loss lossfn criterion",
    "loss.options.label_smoothing": "labelsmoothing smoothing labelsmoothingfactor",
    "data.options.path": "datapath datadir dataroot datasetpath datasetdir traindir data root "
    "d dataset folder input images source",
    "data.options.evaluation_path": "valdir valpath evalpath evaldir testpath",
    "data.options.evaluation_fraction": "validation valpercent valsplit valratio valfraction "
    "testsize",
    "data.options.image_size": "imgsize imagesize inputsize cropsize imgsz resize",
    "schedule.name": "sched scheduler lrscheduler lrschedule lrschedulertype",
    "schedule.step_epochs": "lrstepsize stepsize decayepochs",
    "schedule.gamma": "lrgamma gamma decayrate lrdecay",
    "schedule.final": "lrf minlr etamin minlrratio",
    "schedule.warmup_epochs": "warmup warmupepochs lrwarmupepochs warmupsteps warmupratio",
    "ema.decay": "ema emadecay modelema modelemadecay",
    "step.seed": "seed randomseed manualseed",
    "step.clip_norm": "clipgrad maxgradnorm gradclip gradientclipval clipgradnorm gradientclipping",
    "step.precision": "amp fp16 bf16 useamp precision mixedprecision dtype",
    "step.batch_norm": "syncbn syncbatchnorm usesyncbn",
    "step.recompute": "gradientcheckpointing activationcheckpointing usecheckpoint",
    "step.compile": "compile torchcompile",
    "metrics": "metric metrics evalmetric",
    "epochs": "epoch epochs numepochs maxepochs nepochs numtrainepochs",
    "batch_size": "b bs batchsize trainbatchsize globalbatchsize",
    "--per-device-batch-size": "perdevicetrainbatchsize batchsizepergpu microbatchsize",
    "--accumulate": "accumulationsteps gradientaccumulationsteps accumiter accumulategradbatches "
    "updatefreq",
    "--processes": "gpus ngpus numgpus nproc nprocpernode numprocesses worldsize",
    "--devices": "deviceids gpuids gpu gpuid visibledevices",
    "--device": "accelerator cuda usecuda",
    "--workers": "numworkers nw j dataloadernumworkers",
    "--strategy": "ddp fsdp dataparallel",
    "--name": "expname runname experimentname",
    "--runs": "output outputdir savedir outdir workdir logdir",
    "--checkpoint-every": "savesteps saveintervalsteps",
    "--keep": "savetotallimit savetopk",
    "--max-restarts": "restarts",
    "--loggers": "logger reportto wandb",
}
SYNONYMS = {word: name for name, words in _WORDS.items() for word in words.split()}


def suggest(name: str, known: Iterable[str], *, least: float = 0.6) -> str | None:
    """Return the name of `known` that an unknown name probably means, or None.

    Args:
        name: an option or a dotted key; for synonyms, case, `-`, `_` and all but the last part have
            no effect.
        known: the names that exist.
        least: least similarity of a misspelled name.
    """
    names = list(known)
    meant = SYNONYMS.get(name.rpartition(".")[2].lower().replace("-", "").replace("_", ""))
    if meant in names:
        return meant
    return next(iter(get_close_matches(name, names, n=1, cutoff=least)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """Return the fix of an unknown name: the one that it probably means, or `otherwise`."""
    meant = suggest(name, known)
    if meant is None:
        return otherwise
    return f"did you mean {prefix}{meant}?"


def nearest_path(path: Path) -> Path | None:
    """Return the path in the same folder whose name is most similar, or None."""
    try:
        siblings = [one.name for one in path.parent.iterdir()]
    except OSError:  # no folder, or one that cannot be read
        return None
    name = next(iter(get_close_matches(path.name, siblings, n=1)), None)
    if name is None:
        return None
    return path.with_name(name)
