"""CrAM in Lightning: callbacks that run the compressed pass and validate compressed models."""

from torchcram.integrations.lightning.compressed_pass import CompressedPass
from torchcram.integrations.lightning.validation import CompressedValidation

__all__ = ["CompressedPass", "CompressedValidation"]
