"""Compact files of compressed models: one safetensors file with a manifest in its header."""

from torchcram.artifact.format import Encoding, Entry, Manifest
from torchcram.artifact.reader import load, read_manifest, stream, verify
from torchcram.artifact.writer import save

__all__ = ["Encoding", "Entry", "Manifest", "load", "read_manifest", "save", "stream", "verify"]
