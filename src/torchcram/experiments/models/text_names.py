"""Which names of models are those of language models."""

from __future__ import annotations

from torchcram.experiments.models.factories import is_factory

MINILM = "minilm-l6"
TRANSFORMERS = "transformers/"
PATHS = ("/", "./", "../", "~")  # what a folder begins with


def is_text_model(name: str) -> bool:
    """Whether the name may be that of a language model, without looking for it."""
    if name.startswith(TRANSFORMERS):
        return name != TRANSFORMERS
    return name == MINILM or (name.startswith(PATHS) and not is_factory(name))


ALLOWED = (MINILM, f"{TRANSFORMERS}NAME", "the path of a folder, as ./NAME")
