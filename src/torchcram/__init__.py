"""Train a model once with CrAM; compress it to any size in one shot.

The public names are imported when the first of them is used: `torchcram --version` and `--help`
answer without waiting for torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from torchcram.version import __version__

if TYPE_CHECKING:
    from torchcram.batches import split_batch
    from torchcram.batchnorm import frozen_statistics, tune_batchnorm_
    from torchcram.compress import compress, compress_
    from torchcram.finetune import hold_masks
    from torchcram.operators import (
        NM,
        Chain,
        GlobalTopK,
        Operator,
        Quantize,
        RowTopK,
        Sparsifier,
        UniformTopK,
        parse_operator,
        register_operator,
    )
    from torchcram.optim import (
        C_SAM,
        CRAM,
        CRAM_PLUS,
        SAM,
        TOPK,
        TOPK_PLUS,
        CrAM,
        GraphedStep,
        UpdateRule,
    )
    from torchcram.weights import (
        CoverageWarning,
        Masks,
        Weights,
        compressible_weights,
        masks_of,
        sparsity,
    )

_MODULES = ("batches", "batchnorm", "compress", "finetune", "operators", "optim", "weights")
"""Modules that define the public names."""

__all__ = [
    "CRAM",
    "CRAM_PLUS",
    "C_SAM",
    "NM",
    "SAM",
    "TOPK",
    "TOPK_PLUS",
    "Chain",
    "CoverageWarning",
    "CrAM",
    "GlobalTopK",
    "GraphedStep",
    "Masks",
    "Operator",
    "Quantize",
    "RowTopK",
    "Sparsifier",
    "UniformTopK",
    "UpdateRule",
    "Weights",
    "__version__",
    "compress",
    "compress_",
    "compressible_weights",
    "frozen_statistics",
    "hold_masks",
    "masks_of",
    "parse_operator",
    "register_operator",
    "sparsity",
    "split_batch",
    "tune_batchnorm_",
]


def __getattr__(name: str) -> object:
    """Imports all public names, and with them their modules, when the first of them is used."""
    if name.startswith("__"):  # attributes that Python itself looks up
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _MODULES:
        contents = vars(import_module(f"{__name__}.{module}"))
        globals().update({public: contents[public] for public in __all__ if public in contents})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `torchcram.compress` the function when the module of that name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "compress" and isinstance(value, ModuleType):
            value = value.compress
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
