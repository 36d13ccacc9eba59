"""From the name of a language data set to its tokens."""

from __future__ import annotations

import hashlib
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcram.experiments.data.images.packed import PackedError
from torchcram.experiments.data.images.store import Report, cache_folder, writable
from torchcram.experiments.data.text import files
from torchcram.experiments.data.text.cache import Wanted, contents, read_tokens, write_tokens
from torchcram.experiments.data.text.glue import read_tsv
from torchcram.experiments.data.text.squad import read_squad
from torchcram.experiments.data.text.texts import Texts, TextSet
from torchcram.experiments.data.text.tokens import tokenise_questions, tokenise_sentences
from torchcram.experiments.io.files import remove_leftovers, taking_turns
from torchcram.experiments.models.text import load_tokenizer
from torchcram.experiments.tasks.text_formats import TASKS

if TYPE_CHECKING:
    from torchcram.experiments.recipe import Recipe


def load_text(recipe: Recipe, folder: Path, *, report: Report | None = None) -> TextSet:
    """Loads the data of a recipe, tokenised for its model.

    It is tokenised once, into one file beside the data, or in the user's cache folder where that is
    read-only.

    Args:
        recipe: its sections `data`, `text` and `model` count.
        folder: where the data lies.
        report: called with a line before something that takes long, and on what was left out,
            also when the tokens are there already.

    Raises:
        ValueError: if the files are not there, not what they should be, or hold nothing.
    """
    text, name = recipe.text, recipe.data.name
    if text is None:
        raise ValueError(f"{recipe.name} has no section `text`: it is about images")
    found = files.find(name, text.task, folder)
    tokenizer = load_tokenizer(recipe.model.name)
    wanted = Wanted(
        name=name,
        task=text.task,
        length=text.length,
        stride=text.stride,
        tokenizer=tokenizer_digest(tokenizer),
        source=found.fingerprint(),
    )
    return _cached(found, wanted, tokenizer, report or (lambda _: None))


def tokenizer_digest(tokenizer: Any) -> str:  # noqa: ANN401
    """Returns what differs for tokenizers that do something else."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


def _cached(found: files.Found, wanted: Wanted, tokenizer: Any, report: Report) -> TextSet:  # noqa: ANN401
    places = [found.folder / wanted.file, cache_folder() / wanted.file]
    for path in places:
        if path.is_file():
            try:
                return _told(read_tokens(path, wanted), report)
            except PackedError as error:
                warnings.warn(f"{error}; it is made anew", stacklevel=3)
    path = places[0] if writable(found.folder) else places[1]
    with taking_turns(path.parent):
        with suppress(PackedError):
            # another process made it meanwhile
            return _told(read_tokens(path, wanted), report)
        report(f"tokenising {wanted.name} into {path}")
        remove_leftovers(path.parent, wanted.file)
        data = tokenise(found, wanted, tokenizer)
        for note in data.notes:
            report(f"{wanted.name}: {note}")
        write_tokens(data, path, wanted)
    return read_tokens(path, wanted)


def _told(data: TextSet, report: Report) -> TextSet:
    """Tells what was left out; how much there is, the first note of a split, only once."""
    seen = set()
    for note in data.notes:
        split = note.split(":")[0]
        if split in seen:
            report(f"{data.name}: {note}")
        seen.add(split)
    return data


def tokenise(found: files.Found, wanted: Wanted, tokenizer: Any) -> TextSet:  # noqa: ANN401
    """Reads the files and tokenises what they hold.

    Args:
        found: where they are.
        wanted: task, length and stride.
        tokenizer: a fast one of Transformers.

    Raises:
        ValueError: if a file is not what it should be, or holds nothing.
    """
    notes: list[str] = []
    splits = []
    for place, split in enumerate(files.read(found, wanted.task)):
        which = files.SPLITS[place]
        splits.append(_split(split, wanted, tokenizer, train=place == 0))
        notes += [f"{which}: {note}" for note in splits[-1][1]]
    (train, _), (test, _) = splits
    return TextSet(wanted.name, wanted.task, train, test, contents(train, test), tuple(notes))


def _split(
    split: files.Split,
    wanted: Wanted,
    tokenizer: Any,  # noqa: ANN401
    *,
    train: bool,
) -> tuple[Texts, list[str]]:
    """Returns a split and what there is to say of it."""
    sentences = TASKS[wanted.task].sentences
    if sentences is not None:
        labelled = read_tsv(split.content, split.where, sentences=sentences)
        texts, cut = tokenise_sentences(labelled, tokenizer, length=wanted.length)
        said = {
            "lines skipped, of other columns or labels": labelled.skipped,
            f"sentences cut to {wanted.length} tokens": cut,
        }
    else:
        asked = read_squad(split.content, split.where, placed=train)
        texts, uncovered = tokenise_questions(
            asked, tokenizer, length=wanted.length, stride=wanted.stride
        )
        said = {
            "questions skipped, as the answer is not at its offset": asked.misplaced,
            "questions skipped, as they have no answer": asked.unanswered,
            "questions whose answer is in no window": uncovered if train else 0,
        }
    notes = [f"{len(texts)} sequences of {texts.count} {TASKS[wanted.task].unit}"]
    return texts, notes + [f"{count} {what}" for what, count in said.items() if count]
