"""Running compressed models on NVIDIA GPUs: kernels for 2:4 and low bits where they are faster."""

from torchcram.runtime.gpu.prepare import Prepared, prepare_gpu

__all__ = ["Prepared", "prepare_gpu"]
