"""Running compressed models on NVIDIA GPUs: kernels for 2:4 and low bits where they are faster."""

from torchcram.runtime.gpu.prepare import LayerChoice, Prepared, RunMode, prepare_gpu

__all__ = ["LayerChoice", "Prepared", "RunMode", "prepare_gpu"]
