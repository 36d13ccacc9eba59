"""Image models, by name or by class; `models.text` and `models.causal` have language models."""

from torchcram.experiments.models.build import (
    TORCHVISION,
    build_model,
    is_model_name,
    model_names,
    own_model_names,
    replace_head_,
)
from torchcram.experiments.models.factories import (
    FORMS,
    TIMM,
    is_factory,
    short_name,
    takes_args,
    with_absolute_path,
)
from torchcram.experiments.models.small import (
    VGG,
    BasicBlock,
    ConvNet,
    ProjectionBlock,
    ResNet,
    ResNet18,
    TransformerBlock,
    VisionTransformer,
    resnet20,
)

__all__ = [
    "FORMS",
    "TIMM",
    "TORCHVISION",
    "VGG",
    "BasicBlock",
    "ConvNet",
    "ProjectionBlock",
    "ResNet",
    "ResNet18",
    "TransformerBlock",
    "VisionTransformer",
    "build_model",
    "is_factory",
    "is_model_name",
    "model_names",
    "own_model_names",
    "replace_head_",
    "resnet20",
    "short_name",
    "takes_args",
    "with_absolute_path",
]
