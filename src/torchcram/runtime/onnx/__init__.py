"""Exporting compressed models to ONNX files."""

from torchcram.runtime.onnx.export import export_onnx

__all__ = ["export_onnx"]
