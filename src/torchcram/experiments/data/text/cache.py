"""The tokenised form of a data set: made once, one safetensors file beside the data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram.experiments.data.images.packed import PackedError
from torchcram.experiments.data.text.texts import Gold, Texts, TextSet
from torchcram.files import let_read, written_aside

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "torchcram tokens 2"
KEY = "torchcram"  # of the file's metadata
TENSORS = ("tokens", "kinds", "ends", "labels", "examples", "offsets")
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Wanted:
    """What tells one tokenised data set from another.

    Attributes:
        name: of the data set.
        task: of it.
        length: of a sequence, at most.
        stride: of windows on a paragraph.
        tokenizer: a digest of all that it does.
        source: a fingerprint of the files.
    """

    name: str
    task: str
    length: int
    stride: int
    tokenizer: str
    source: str

    @property
    def file(self) -> str:
        """What the file is called; other files of the same data have other names."""
        return f"{self.name}.{self.length}-{self.stride}.{self.tokenizer[:8]}.tokens.safetensors"


def contents(*splits: Texts) -> str:
    """Returns a short text that differs for other sequences, labels, places or right answers."""
    digest = hashlib.sha256()
    for split in splits:
        for tensor in (getattr(split, key) for key in TENSORS):
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(_written(split.gold))
    return digest.hexdigest()[:16]


def write_tokens(data: TextSet, path: Path, wanted: Wanted) -> None:
    """Writes the file aside, then moves it into place: it is never there by half."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, split in zip(SPLITS, (data.train, data.test), strict=True):
        tensors |= {f"{name}.{key}": getattr(split, key).contiguous() for key in TENSORS}
        if split.gold is not None:
            text = bytearray(_written(split.gold))
            tensors[f"{name}.gold"] = torch.frombuffer(text, dtype=torch.uint8)
    said = {"format": FORMAT, **asdict(wanted), "contents": data.contents, "notes": data.notes}
    with written_aside(path) as aside:
        save_file(tensors, aside, {KEY: json.dumps(said)})
        let_read(aside)


def read_tokens(path: Path, wanted: Wanted) -> TextSet:
    """Reads a file; a truncated, stale or foreign one is a PackedError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said = json.loads((file.metadata() or {})[KEY])
            for key, value in {"format": FORMAT, **asdict(wanted)}.items():
                if said[key] != value:
                    raise ValueError(f"its {key} is {said[key]!r}, needed is {value!r}")
            names = set(file.keys())
            train, test = (
                Texts(
                    **{key: file.get_tensor(f"{split}.{key}") for key in TENSORS},
                    gold=_gold(file.get_tensor(f"{split}.gold"))
                    if f"{split}.gold" in names
                    else None,
                )
                for split in SPLITS
            )
        notes = tuple(map(str, said["notes"]))
        return TextSet(wanted.name, wanted.task, train, test, str(said["contents"]), notes)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise PackedError(f"{path} is not the tokenised {wanted.name!r}: {error}") from error


def _written(gold: Gold | None) -> bytes:
    return json.dumps(gold and asdict(gold)).encode()


def _gold(text: Tensor) -> Gold:
    said = json.loads(text.numpy().tobytes())
    return Gold(
        tuple(said["contexts"]), tuple(said["context_of"]), tuple(map(tuple, said["answers"]))
    )
