"""Configuration of recipes, strategies and runs: frozen data without torch or files."""

from samestep.config.recipe import (
    DEFAULT_CHECKSUM_EVERY,
    DEFAULT_KEEP,
    DEFAULT_PREFETCH,
    LOGGER_GROUP,
    LOGGERS,
    BadSamples,
    DataConfig,
    DeviceKind,
    EmaConfig,
    LearningRateConfig,
    LearningRateRule,
    ModelConfig,
    NamedConfig,
    OptimizerConfig,
    Precision,
    Recipe,
    RecipeStep,
    Reduction,
    RunOptions,
    ScheduleConfig,
    default_workers,
)
from samestep.config.strategy import MeshConfig, MeshShape, StrategyConfig, resolve_mesh
