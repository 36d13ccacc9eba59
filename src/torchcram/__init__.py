"""Train a model once with CrAM; compress it to any size in one shot."""

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
)
from torchcram.optim import C_SAM, CRAM, CRAM_PLUS, SAM, TOPK, TOPK_PLUS, CrAM, UpdateRule
from torchcram.version import __version__
from torchcram.weights import (
    CoverageWarning,
    Masks,
    Weights,
    compressible_weights,
    masks_of,
    sparsity,
)

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
    "sparsity",
    "tune_batchnorm_",
]
