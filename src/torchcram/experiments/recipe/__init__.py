"""Recipes: a training and the compressions after it, as YAML files with a strict schema."""

from torchcram.experiments.recipe.loading import load_recipe, recipe_names
from torchcram.experiments.recipe.schema import (
    CompressConfig,
    CramConfig,
    DataConfig,
    DistillConfig,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    ScheduleConfig,
    StopConfig,
    TextConfig,
    TrainConfig,
)

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
    "TextConfig",
    "TrainConfig",
    "load_recipe",
    "recipe_names",
]
