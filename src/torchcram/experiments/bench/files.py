"""Files of a model: how large they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram import artifact
from torchcram.experiments.bench.engines import UnableError
from torchcram.experiments.io.weights import save_model

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.experiments.bench.cases import Case


class Files:
    """Files of models in a folder, each written once.

    Args:
        folder: to write into.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._onnx: dict[str, Path | str] = {}

    def plain_bytes(self, case: Case) -> int:
        """Returns the size of a plain safetensors file."""
        path = self._path(case, "plain.safetensors")
        save_model(case.model, path)
        return _size_and_remove(path)

    def compact_bytes(self, case: Case) -> int:
        """Returns the size of a compact file."""
        if case.file_bytes is not None:
            return case.file_bytes
        path = self._path(case, "compact.safetensors")
        said = None if case.operator is None else str(case.operator)
        artifact.save(case.model, path, operator=said)
        return _size_and_remove(path)

    def onnx(self, case: Case, example: Tensor) -> Path:
        """Returns the ONNX file of a model for inputs of the shape of `example`, in any number.

        Raises:
            UnableError: saying why there is none.
        """
        path = self._path(case, f"{'x'.join(map(str, example.shape[1:]))}.onnx")
        if path.name not in self._onnx:
            self._onnx[path.name] = self._export(case, example, path)
        found = self._onnx[path.name]
        if isinstance(found, str):
            raise UnableError(found)
        return found

    def _export(self, case: Case, example: Tensor, path: Path) -> Path | str:
        """Returns the file, or why there is none."""
        try:
            from torchcram.runtime.onnx import export_onnx

            export_onnx(case.model, path, (example,), operator=case.operator, weights=case.weights)
        except ImportError as error:
            return f'{error.name} is missing: pip install "torchcram[export]"'
        except ValueError as error:
            return str(error).splitlines()[0]
        return path

    def _path(self, case: Case, kind: str) -> Path:
        return self._folder / f"{re.sub('[^A-Za-z0-9.+-]', '-', case.target)}.{kind}"


def _size_and_remove(path: Path) -> int:
    size = path.stat().st_size
    path.unlink()
    return size
