"""What a recipe says, as frozen data: no torch, no file, no environment."""

from samestep.config.layout import Layout, settle
from samestep.config.parts import BadSamples, DataPart, ModelPart, OptimizerPart, Part
from samestep.config.recipe import Recipe
from samestep.config.run_options import DEFAULT_PREFETCH, DeviceKind, RunOptions, default_workers
from samestep.config.schedules import EmaPart, LearningRatePart, LearningRateRule, SchedulePart
from samestep.config.step_rules import BatchNorm, NonFinite, Precision, Reduction, StepRules
from samestep.config.strategy import Mesh, StrategyPart

__all__ = [
    "DEFAULT_PREFETCH",
    "BadSamples",
    "BatchNorm",
    "DataPart",
    "DeviceKind",
    "EmaPart",
    "Layout",
    "LearningRatePart",
    "LearningRateRule",
    "Mesh",
    "ModelPart",
    "NonFinite",
    "OptimizerPart",
    "Part",
    "Precision",
    "Recipe",
    "Reduction",
    "RunOptions",
    "SchedulePart",
    "StepRules",
    "StrategyPart",
    "default_workers",
    "settle",
]
