"""Compact files of compressed models: safetensors files with a manifest in the header."""

from torchcram.artifact.format import Encoding, Entry, Manifest
from torchcram.artifact.reader import load, read_manifest, stream, verify
from torchcram.artifact.writer import save

__all__ = ["Encoding", "Entry", "Manifest", "load", "read_manifest", "save", "stream", "verify"]
