"""Recipes: a training and the compressions after it, as YAML files with a strict schema."""

from torchcram.experiments.data.config import DataConfig, TextConfig
from torchcram.experiments.models.config import ModelConfig
from torchcram.experiments.recipe.loading import load_recipe, recipe_names
from torchcram.experiments.recipe.schema import (
    CompressConfig,
    CramConfig,
    DistillConfig,
    OptimizerConfig,
    Recipe,
    ScheduleConfig,
    StopConfig,
    TrainConfig,
    training_passes,
)
from torchcram.experiments.tasks import TaskConfig

__all__ = [
    "CompressConfig",
    "CramConfig",
    "DataConfig",
    "DistillConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Recipe",
    "ScheduleConfig",
    "StopConfig",
    "TaskConfig",
    "TextConfig",
    "TrainConfig",
    "load_recipe",
    "recipe_names",
    "training_passes",
]
