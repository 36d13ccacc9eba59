"""Compressed models as ONNX files."""

from torchcram.runtime.onnx.export import export_onnx

__all__ = ["export_onnx"]
