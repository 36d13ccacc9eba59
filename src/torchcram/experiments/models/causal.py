"""Language models of Transformers that generate: they score the next token at every position."""

from __future__ import annotations

from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcram.experiments.models.text import GGUF, find_model, find_source, named_errors, quiet


class CausalModel(nn.Module):
    """A model of Transformers that is called with one tensor, as image models are.

    Args:
        model: Model of Transformers with a head for the next token.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, t) tokens to the scores of the token after each, (n, t, vocabulary)."""
        logits: Tensor = self.model(input_ids=x, use_cache=False).logits
        return logits

    @property
    def config(self) -> Any:  # noqa: ANN401
        """Configuration of the model."""
        return self.model.config

    @property
    def positions(self) -> int | None:
        """Largest number of tokens of a text; None where there is no limit."""
        limit: int | None = getattr(self.config, "max_position_embeddings", None)
        return None if limit is None or limit < 0 else limit

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have an embedding."""
        inner: Any = self.model
        return len(inner.get_input_embeddings().weight)


def build_causal_model(name: str, *, pretrained: bool, checkpointing: bool = False) -> CausalModel:
    """Returns a model that scores the next token, with its own head.

    Args:
        name: Name of the model, as `find_model` takes it.
        pretrained: Whether the weights are those of the folder or file; otherwise they are
            initialised.
        checkpointing: Whether training recomputes the activations of each layer in the backward
            pass instead of keeping them.

    Raises:
        ValueError: If the model cannot be loaded, or has no such head.
    """
    import transformers

    source, options = find_source(name)
    kind: Any = transformers.AutoModelForCausalLM
    with named_errors(name, "a head for language-modelling"), quiet():
        config = transformers.AutoConfig.from_pretrained(source, **options)
        # a model in half precision is trained, and loaded again, in float32
        if not pretrained or options:
            model = kind.from_config(config, dtype=torch.float32)
        if pretrained:
            # the progress bar for GGUF files cannot be switched off
            with redirect_stderr(StringIO()) if options else nullcontext():
                loaded = kind.from_pretrained(source, config=config, dtype=torch.float32, **options)
            if options:  # one that was read from GGUF refuses to be saved, so its weights are taken
                model.load_state_dict(loaded.state_dict())
            else:
                model = loaded
        if checkpointing:
            # CUDA graphs cannot restore the random state, which only dropout needs
            kept = {"use_reentrant": False, "preserve_rng_state": _has_dropout(model)}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kept)
    return CausalModel(model.train())


def find_gguf_source(name: str) -> Path:
    """Returns the GGUF file that a model is read from.

    Args:
        name: Name of the model, as `find_model` takes it.

    Raises:
        ValueError: If the model is not read from a GGUF file.
    """
    source = find_model(name)
    if not source.endswith(GGUF):
        raise ValueError(
            f"model {name!r} is read from {source}, which is not a GGUF file; only a model that is "
            "read from one can be written as one, because its tokenizer and metadata are copied"
        )
    return Path(source)


def _has_dropout(model: nn.Module) -> bool:
    layers = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules())
    return layers or bool(getattr(model.config, "attention_dropout", 0))
