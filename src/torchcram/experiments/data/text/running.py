"""Running text for language models: reads files of paragraphs, and tokenises each once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcram.experiments.data.images.folders import ARCHIVE
from torchcram.experiments.data.text.files import Location, Split, read_archive
from torchcram.experiments.data.text.loading import tokenizer_digest
from torchcram.experiments.io.cache import Report, cached, open_cache, write_cache

FORMAT = "torchcram running text 1"
SUFFIXES = (".txt", ".jsonl")
TRAIN, TEST = ("train",), ("test", "valid")  # names of the files; the first that exists is read
KEY = "text"  # key of a document in JSON lines
CHUNK = 1 << 22  # characters that are tokenised at a time, at least
MOST_UNKNOWN = 0.5  # share of tokens that a tokenizer may not know

_BLANK_LINES = re.compile(r"\n\s*\n")
_QUOTED = re.compile(r'" ([^"]*?) "')
_BRACKETED = re.compile(r"([(\[]) (.*?) ([)\]])")
_APOSTROPHE = re.compile(r" '(s|t|m|d|ll|re|ve)\b")
_HEADING = re.compile(r"^ ?((?:= )+)(.*?)(?: =)+ ?$")
_BEFORE_PUNCTUATION = re.compile(r" ([,.;:!?%)\]])(?=[\s,.;:!?%)\]\"]|$)")


@dataclass(frozen=True, eq=False)
class RunningText:
    """Tokens of a dataset.

    Attributes:
        train: Tokens of the training split, int32, (t,); empty if it was not asked for.
        test: Tokens of the test split, int32, (t,).
        contents: Digest of the tokens.
        notes: Notes on the sizes of the splits.
    """

    train: Tensor
    test: Tensor
    contents: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class CacheKey:
    """Everything that the tokens of a dataset depend on.

    Attributes:
        name: Name of the dataset.
        splits: Names of the splits that are tokenised.
        tokenizer: Digest of the tokenizer.
        source: Fingerprint of the files.
    """

    name: str
    splits: str
    tokenizer: str
    source: str

    @property
    def file(self) -> str:
        """Name of the cache file; other tokenizers have other names."""
        return f"{self.name}.{self.splits}.{self.tokenizer[:8]}.running.safetensors"


def load_running(
    name: str,
    folder: Path,
    *,
    tokenizer: Callable[[], Any],
    train: bool = True,
    report: Report | None = None,
) -> RunningText:
    """Loads running text, tokenised.

    A dataset is a folder, or a .tar.xz archive of it, with `train.txt` and `test.txt`, whose
    paragraphs are separated by blank lines, or with `train.jsonl` and `test.jsonl`, whose lines are
    JSON objects with a key `text`. Without a test file, `valid` is read in its place. The
    paragraphs of a .txt file are joined by a blank line; the documents of a .jsonl file end with
    the end-of-text token of the tokenizer. No other special token is added.

    It is tokenised once, into one file beside the data, or in the user's cache folder if that is
    read-only. Datasets whose names begin with "wikitext" lose their tokenisation first.

    Args:
        name: Name of the dataset.
        folder: Folder that the data lies in.
        tokenizer: Function that loads a fast tokenizer of Transformers; it is called after the
            files of the dataset were found.
        train: Whether the training split is read too.
        report: Function that is called with a line of text before something that takes long.

    Raises:
        ValueError: If the files are missing, malformed or empty, or if the tokenizer does not know
            most of a text.
    """
    location = find_running(name, folder, TRAIN if train else TEST)
    loaded = tokenizer()
    key = CacheKey(
        name=name,
        splits="train-test" if train else "test",
        tokenizer=tokenizer_digest(loaded),
        source=location.fingerprint(),
    )
    report = report or (lambda _: None)

    def write(path: Path) -> None:
        report(f"tokenising {name} into {path}")
        data = _tokenise(location, name, loaded, train=train)
        for note in data.notes:
            report(f"{name}: {note}")
        tensors = {"train": data.train, "test": data.test}
        described = {**asdict(key), "contents": data.contents, "notes": data.notes}
        write_cache(path, tensors, {"format": FORMAT, **described})

    def read(path: Path) -> RunningText:
        expected = {"format": FORMAT, **asdict(key)}
        with open_cache(path, f"the tokenised {name!r}", expected) as (file, description):
            tokens = {split: file.get_tensor(split) for split in ("train", "test")}
            notes = tuple(map(str, description["notes"]))
            return RunningText(**tokens, contents=str(description["contents"]), notes=notes)

    data, _ = cached(location.folder, key.file, read=read, write=write)
    return data


def find_running(name: str, folder: Path, needed: Sequence[str] = TRAIN) -> Location:
    """Finds the folder NAME or the archive NAME.tar.xz.

    Args:
        name: Name of the dataset.
        folder: Folder that the data lies in, or that of the files itself.
        needed: Names of files without their endings, of which the folder must have one.

    Raises:
        ValueError: If there are no such files; the message says what was looked for.
    """
    if _has(folder / name, needed):
        return Location(folder, folder / name)
    if folder.absolute().name == Path(name).name and _has(folder, needed):
        return Location(folder.absolute().parent, folder)
    archive = folder / f"{name}{ARCHIVE}"
    if archive.is_file():
        return Location(folder, archive, name)
    looked = ", ".join(f"{name}/{split}{suffix}" for split in needed for suffix in SUFFIXES)
    raise ValueError(
        f"dataset {name!r} is not in {folder}: looked for {looked} and {name}{ARCHIVE}"
    )


def _has(folder: Path, needed: Sequence[str]) -> bool:
    return any((folder / f"{name}{suffix}").is_file() for name in needed for suffix in SUFFIXES)


def _tokenise(
    location: Location,
    name: str,
    tokenizer: Any,  # noqa: ANN401
    *,
    train: bool,
) -> RunningText:
    parts = {"train": TRAIN, "test": TEST} if train else {"test": TEST}
    tokens = {"train": torch.zeros(0, dtype=torch.int32)}
    notes = []
    for part, split in zip(parts, _read(location, list(parts.values())), strict=True):
        texts = read_texts(split, tokenised=name.startswith("wikitext"))
        ended = split.where.endswith(".jsonl")
        tokens[part] = tokenise_running(texts, tokenizer, split.where, ended=ended)
        kind = "documents" if ended else "paragraphs"
        notes.append(f"{part}: {len(tokens[part])} tokens of {len(texts)} {kind}")
    digest = hashlib.sha256()
    for part in ("train", "test"):
        digest.update(f"{len(tokens[part])}".encode() + tokens[part].numpy().tobytes())
    return RunningText(tokens["train"], tokens["test"], digest.hexdigest()[:16], tuple(notes))


def _read(location: Location, splits: Sequence[Sequence[str]]) -> list[Split]:
    """Reads one file for each split: the first of its names that there is."""
    if location.inside:
        files = read_archive(location, SUFFIXES)
    else:
        names = [path for path in location.source.iterdir() if path.suffix in SUFFIXES]
        files = {path.name: b"" for path in names}
    chosen = []
    for names_of_split in splits:
        possible = [f"{name}{suffix}" for name in names_of_split for suffix in SUFFIXES]
        file = next((name for name in possible if name in files), None)
        if file is None:
            there = ", ".join(sorted(files)) or "none"
            raise ValueError(
                f"{location.source}: one of {', '.join(possible)} is needed; there is: {there}"
            )
        if location.inside:
            chosen.append(Split(files[file], f"{location.source}: {location.inside}/{file}"))
        else:
            path = location.source / file
            chosen.append(Split(path.read_bytes(), str(path)))
    return chosen


def read_texts(split: Split, *, tokenised: bool = False) -> list[str]:
    """Returns the paragraphs of a .txt file, or the documents of JSON lines.

    Args:
        split: Content and name of the file.
        tokenised: Whether it has the tokenisation of WikiText, which is undone; there every line
            is a paragraph.

    Raises:
        ValueError: If the file is not UTF-8, not JSON lines, or has no text.
    """
    try:
        content = split.content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{split.where} is not UTF-8: {error}") from None
    if split.where.endswith(".jsonl"):
        pieces = list(_documents(content, split.where))
    elif tokenised:
        pieces = [detokenised(line) for line in content.split("\n")]
    else:
        pieces = _BLANK_LINES.split(content.replace("\r\n", "\n"))
    texts = [text for piece in pieces if (text := piece.strip())]
    if not texts:
        raise ValueError(f"{split.where} has no text")
    return texts


def _documents(content: str, where: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)[KEY]
            document.encode()  # JSON can hold lone surrogates, which tokenizers cannot take
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f"{where}, line {number}, is not a JSON object with a text under {KEY!r}"
            ) from None
        yield document


def detokenised(line: str) -> str:
    """Returns a line of WikiText without its tokenisation: "1 @,@ 000 km ." becomes "1,000 km."."""
    for mark in ("-", ",", "."):
        line = line.replace(f" @{mark}@ ", mark)
    line = _BRACKETED.sub(r"\1\2\3", line)
    line = _QUOTED.sub(r'"\1"', line)
    line = _APOSTROPHE.sub(r"'\1", line).replace("s ' ", "s' ")
    line = _HEADING.sub(_heading, line)
    return _BEFORE_PUNCTUATION.sub(r"\1", line)


def _heading(match: re.Match[str]) -> str:
    marks = match[1].replace(" ", "")
    return f"{marks} {match[2]} {marks}"


def tokenise_running(
    texts: Sequence[str],
    tokenizer: Any,  # noqa: ANN401
    where: str,
    *,
    ended: bool = False,
) -> Tensor:
    """Returns the tokens of texts one after another, int32, (t,).

    Args:
        texts: Paragraphs or documents.
        tokenizer: Fast tokenizer of Transformers.
        where: Name of the file for error messages.
        ended: Whether every text ends with the end-of-text token, instead of a blank line between
            two.

    Raises:
        ValueError: If the tokenizer does not know most of the text.
    """
    end = tokenizer.eos_token_id if ended else None
    pieces = []
    for chunk in _chunks(texts) if end is None else ([text] for text in texts):
        ids = tokenizer.encode("\n\n".join(chunk), add_special_tokens=False)
        pieces.append(np.array(ids if end is None else [*ids, end], np.int32))
    tokens = torch.from_numpy(np.concatenate(pieces))
    unknown = tokenizer.unk_token_id
    if unknown is not None and len(tokens):
        share = float((tokens == unknown).double().mean())
        if share > MOST_UNKNOWN:
            raise ValueError(
                f"{where}: the tokenizer does not know {100 * share:.0f} % of the tokens, "
                f"{tokenizer.unk_token!r}; it does not fit the text"
            )
    return tokens


def _chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields texts in groups of at least `CHUNK` characters; all but the last end with a blank."""
    chunk: list[str] = []
    count = 0
    for text in texts:
        chunk.append(text)
        count += len(text)
        if count >= CHUNK:
            yield [*chunk, ""]
            chunk, count = [], 0
    if chunk:
        yield chunk
