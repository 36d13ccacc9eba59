"""Loads text datasets by their names; their tokens are kept in a file beside the data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcram.experiments.data.text import files
from torchcram.experiments.data.text.datasets import References, Texts, TextSet
from torchcram.experiments.data.text.formats import TEXT_FORMATS
from torchcram.experiments.data.text.glue import read_tsv
from torchcram.experiments.data.text.squad import read_squad
from torchcram.experiments.data.text.tokens import tokenise_questions, tokenise_sentences
from torchcram.experiments.io.cache import Report, cached, open_cache, write_cache

if TYPE_CHECKING:
    from torch import Tensor


FORMAT = "torchcram tokens 3"
TENSORS = ("tokens", "kinds", "ends", "labels", "examples", "offsets")
SPLITS = ("train", "test")


@dataclass(frozen=True)
class CacheKey:
    """Everything that the tokens of a dataset depend on.

    Attributes:
        name: Name of the dataset.
        task: Format of the dataset.
        length: Greatest length of a sequence in tokens.
        stride: Number of tokens by which windows on a long paragraph overlap.
        tokenizer: Digest of the tokenizer.
        source: Fingerprint of the files.
    """

    name: str
    task: str
    length: int
    stride: int
    tokenizer: str
    source: str

    @property
    def file(self) -> str:
        """Name of the cache file; other lengths and tokenizers have other names."""
        return f"{self.name}.{self.length}-{self.stride}.{self.tokenizer[:8]}.tokens.safetensors"


def contents(*splits: Texts) -> str:
    """Returns a digest of the sequences, labels, offsets and right answers of splits."""
    digest = hashlib.sha256()
    for split in splits:
        for tensor in (getattr(split, key) for key in TENSORS):
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(_written(split.references))
    return digest.hexdigest()[:16]


def write_tokens(data: TextSet, path: Path, key: CacheKey) -> None:
    """Writes the tokens of a dataset to a file, atomically."""
    tensors: dict[str, Tensor] = {}
    for name, split in zip(SPLITS, (data.train, data.test), strict=True):
        tensors |= {f"{name}.{field}": getattr(split, field) for field in TENSORS}
        if split.references is not None:
            text = bytearray(_written(split.references))
            tensors[f"{name}.references"] = torch.frombuffer(text, dtype=torch.uint8)
    described = {"format": FORMAT, **asdict(key), "contents": data.contents, "notes": data.notes}
    write_cache(path, tensors, described)


def read_tokens(path: Path, key: CacheKey) -> TextSet:
    """Reads a file of `write_tokens`.

    Raises:
        CacheError: If the file is damaged, out of date or holds something else.
    """
    expected = {"format": FORMAT, **asdict(key)}
    with open_cache(path, f"the tokenised {key.name!r}", expected) as (file, description):
        names = set(file.keys())
        train, test = (
            Texts(
                **{name: file.get_tensor(f"{split}.{name}") for name in TENSORS},
                references=_references(file.get_tensor(f"{split}.references"))
                if f"{split}.references" in names
                else None,
            )
            for split in SPLITS
        )
        notes = tuple(map(str, description["notes"]))
        return TextSet(key.name, key.task, train, test, str(description["contents"]), notes)


def _written(references: References | None) -> bytes:
    return json.dumps(references and asdict(references)).encode()


def _references(text: Tensor) -> References:
    described = json.loads(text.numpy().tobytes())
    return References(
        tuple(described["contexts"]),
        tuple(described["context_of"]),
        tuple(map(tuple, described["answers"])),
    )


def load_text(
    name: str,
    folder: Path,
    *,
    task: str,
    length: int,
    stride: int,
    tokenizer: Callable[[], Any],
    report: Report | None = None,
) -> TextSet:
    """Loads a dataset, tokenised.

    It is tokenised once, into one file beside the data, or in the user's cache folder if that is
    read-only.

    Args:
        name: Name of the dataset.
        folder: Folder that the data lies in.
        task: Format of the dataset, one of `TEXT_FORMATS`.
        length: Greatest length of a sequence in tokens.
        stride: Number of tokens by which windows on a long paragraph overlap.
        tokenizer: Function that loads a fast tokenizer of Transformers; it is called after the
            files of the dataset were found.
        report: Function that is called with a line of text before something that takes long, and
            about everything that was left out, whether or not the tokens are cached.

    Raises:
        ValueError: If the files are missing, malformed or empty.
    """
    location = files.find(name, task, folder)
    loaded = tokenizer()
    key = CacheKey(
        name=name,
        task=task,
        length=length,
        stride=stride,
        tokenizer=tokenizer_digest(loaded),
        source=location.fingerprint(),
    )
    report = report or (lambda _: None)

    def write(path: Path) -> None:
        report(f"tokenising {name} into {path}")
        data = tokenise(location, key, loaded)
        for note in data.notes:
            report(f"{name}: {note}")
        write_tokens(data, path, key)

    data, made = cached(
        location.folder, key.file, read=lambda path: read_tokens(path, key), write=write
    )
    if not made:
        _report_losses(data, report)
    return data


def tokenizer_digest(tokenizer: Any) -> str:  # noqa: ANN401
    """Returns a digest of everything that a tokenizer does."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


def _report_losses(data: TextSet, report: Report) -> None:
    """Reports what was left out: all notes but the first of each split, which counts sequences."""
    seen = set()
    for note in data.notes:
        split = note.split(":")[0]
        if split in seen:
            report(f"{data.name}: {note}")
        seen.add(split)


def tokenise(location: files.Location, key: CacheKey, tokenizer: Any) -> TextSet:  # noqa: ANN401
    """Reads the files and tokenises what they hold.

    Args:
        location: Files of the dataset.
        key: Format, length and stride.
        tokenizer: Fast tokenizer of Transformers.

    Raises:
        ValueError: If a file is malformed or empty.
    """
    notes: list[str] = []
    splits = []
    for name, split in zip(files.SPLITS, files.read(location, key.task), strict=True):
        splits.append(_split(split, key, tokenizer, train=name == "train"))
        notes += [f"{name}: {note}" for note in splits[-1][1]]
    (train, _), (test, _) = splits
    return TextSet(key.name, key.task, train, test, contents(train, test), tuple(notes))


def _split(
    split: files.Split,
    key: CacheKey,
    tokenizer: Any,  # noqa: ANN401
    *,
    train: bool,
) -> tuple[Texts, list[str]]:
    """Returns a tokenised split, and notes on its size and on what was left out or cut."""
    sentences = TEXT_FORMATS[key.task].sentences
    if sentences is not None:
        labelled = read_tsv(split.content, split.where, sentences=sentences)
        texts, cut = tokenise_sentences(labelled, tokenizer, length=key.length)
        described = {
            "lines skipped, of other columns or labels": labelled.skipped,
            f"sentences cut to {key.length} tokens": cut,
        }
    else:
        questions = read_squad(split.content, split.where, placed=train)
        texts, uncovered = tokenise_questions(
            questions, tokenizer, length=key.length, stride=key.stride
        )
        described = {
            "questions skipped, as the answer is not at its offset": questions.misplaced,
            "questions skipped, as they have no answer": questions.unanswered,
            "questions whose answer is in no window": uncovered if train else 0,
        }
    notes = [f"{len(texts)} sequences of {texts.count} {TEXT_FORMATS[key.task].unit}"]
    return texts, notes + [f"{count} {what}" for what, count in described.items() if count]
