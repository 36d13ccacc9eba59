"""Pruners with options reach the files that commands write."""

from pathlib import Path

import pytest
from commands import succeed

from torchcram import artifact
from torchcram.experiments.bench.record import read_bench

TARGET = "obs:m16@global:0.9+int8"


def test_files_are_exported_and_measured_by_an_operator_with_options(run):
    succeed("export", run, "--to", TARGET, "--out", "files")
    (path,) = Path("files").iterdir()
    manifest = artifact.read_manifest(path)
    assert manifest.operator == TARGET
    assert "mask+int8" in {str(entry.encoding) for entry in manifest.tensors.values()}
    quick = ("--rounds", 1, "--threads", 1, "--batch", 1, "--engines", "torch", "--no-accuracy")
    succeed("bench", run, "--to", TARGET, *quick, "--json", "found.json")
    found = read_bench(Path("found.json")).subjects[1]
    assert found.target == TARGET
    assert found.compact_bytes < 0.5 * found.plain_bytes


def test_an_onnx_file_of_an_operator_with_options(run):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    succeed("export", run, "--to", TARGET, "--format", "onnx", "--out", "files")
    (path,) = Path("files").iterdir()
    assert "DequantizeLinear" in {node.op_type for node in onnx.load(path).graph.node}
