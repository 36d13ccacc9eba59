"""Engines that generate text: Transformers, the kernels of torchcram under it, and llama.cpp."""

from __future__ import annotations

import copy
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchcram.experiments.bench.engines import UnableError
from torchcram.runtime import report
from torchcram.runtime.cpu.generation import (
    prepare_prompts,
    round_for_generation,
    with_single_tokens,
)
from torchcram.runtime.cpu.row_matrix import INT4, RowLinear

LLAMA_CPP = "llama.cpp"
MEGA = 1e6


class Seconds(NamedTuple):
    """Time of the prompt up to the first new token, and of a token after it."""

    prompt: float
    token: float


class Generator(Protocol):
    """A model that an engine has prepared to generate."""

    @property
    def note(self) -> str:
        """Remark for the table."""

    def generate(self, prompt: Tensor, tokens: int) -> Seconds:
        """Generates greedily: a token after the prompt (1, t), and `tokens` more."""

    def next_scores(self, prompt: Tensor, forced: Tensor) -> Tensor | None:
        """Returns the scores after each of the given tokens, which follow the prompt one by one.

        Returns:
            Scores (1, t, vocabulary); None where the engine does not tell them.
        """


class TransformersGenerator:
    """`generate` of a model of Transformers.

    Args:
        model: Model in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        packed = [layer for layer in model.modules() if isinstance(layer, RowLinear)]
        read = sum(layer.nbytes for layer in packed) / MEGA
        self.note = ""
        if packed:
            layers = report(model)
            sparse = sum(layer.sparse for layer in layers)
            self.note = f"{read:.3g} MB per token; prompt: {sparse} of {len(layers)} layers sparse"

    @torch.inference_mode()
    def generate(self, prompt: Tensor, tokens: int) -> Seconds:
        """Generates greedily, whatever the settings of the model are."""
        clock = _TokenClock()
        begin = time.perf_counter()
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens + 1,
            min_new_tokens=tokens + 1,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=0,
            streamer=clock,
        )
        return clock.seconds(begin, tokens)

    @torch.inference_mode()
    def next_scores(self, prompt: Tensor, forced: Tensor) -> Tensor:
        """Returns the scores after each of the given tokens."""
        cache = self._model(input_ids=prompt, use_cache=True).past_key_values
        scores = []
        for token in forced.split(1, dim=1):
            output = self._model(input_ids=token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            scores.append(output.logits[:, -1:])
        return torch.cat(scores, dim=1).float()


class _TokenClock:
    """Notes when each token was there; `generate` calls it with the prompt and every new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:  # noqa: ARG002  tokens themselves do not matter
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing at the end of the text."""

    def seconds(self, begin: float, tokens: int) -> Seconds:
        """Returns the times of the prompt and of a token after the first."""
        first, *others = self.times[1:]  # the first call is with the prompt
        if len(others) != tokens:
            raise RuntimeError(f"{len(others)} tokens were generated instead of {tokens}")
        return Seconds(first - begin, (others[-1] - first) / tokens)


class LlamaCppGenerator:
    """llama.cpp with a GGUF file.

    Args:
        path: File of the model.
        threads: Number of threads.
        context: Largest number of tokens of a text.
        vocabulary: Number of tokens that the model of the run has embeddings for.

    Raises:
        UnableError: If llama-cpp-python is missing, or the file is of a model with other tokens.
    """

    def __init__(self, path: Path, *, threads: int, context: int, vocabulary: int) -> None:
        self._model = _load_gguf(path, threads, context, vocabulary)
        self.note = f"file of {path.stat().st_size / MEGA:.3g} MB"

    def generate(self, prompt: Tensor, tokens: int) -> Seconds:
        """Generates greedily, with the prompt computed anew."""
        self._model.reset()
        times, begin = [], time.perf_counter()
        for _ in self._model.generate(prompt[0].tolist(), temp=0.0):
            times.append(time.perf_counter())
            if len(times) > tokens:
                break
        return Seconds(times[0] - begin, (times[-1] - times[0]) / tokens)

    def next_scores(self, prompt: Tensor, forced: Tensor) -> None:
        """Returns None: the file holds another model than torch runs."""


class LlamaCppScores(nn.Module):
    """Scores of llama.cpp for whole windows of text, as `CausalModel` returns them.

    Args:
        path: File of the model.
        threads: Number of threads.
        context: Largest number of tokens of a window.
        vocabulary: Number of tokens that the model of the run has embeddings for.
    """

    def __init__(self, path: Path, *, threads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self._model = _load_gguf(path, threads, context, vocabulary, logits_all=True)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, t) tokens to the scores of the token after each, (n, t, vocabulary)."""
        rows = []
        for tokens in x.tolist():
            self._model.reset()
            self._model.eval(tokens)
            rows.append(torch.tensor(self._model.scores[: len(tokens)]))
        return torch.stack(rows)


def _load_gguf(path: Path, threads: int, context: int, vocabulary: int, **options: bool) -> Any:  # noqa: ANN401
    try:
        import llama_cpp
    except ImportError:
        raise UnableError("llama_cpp is missing: pip install llama-cpp-python") from None
    model = llama_cpp.Llama(
        str(path),
        n_threads=threads,
        n_threads_batch=threads,
        n_ctx=context,
        verbose=False,
        **options,
    )
    if model.n_vocab() != vocabulary:
        raise UnableError(
            f"the file has {model.n_vocab()} tokens in its vocabulary, and the model {vocabulary}"
        )
    return model


class PromptKernels:
    """A model of Transformers with kernels for prompts, made once for all engines that need it.

    Args:
        model: Model of Transformers; it stays unchanged.
        prompt: Prompt that the kernels are chosen for.
    """

    def __init__(self, model: nn.Module, prompt: Tensor) -> None:
        self._model, self._prompt = model, prompt
        self._made: tuple[int, nn.Module] | None = None

    def with_single_tokens(self, dtype: torch.dtype) -> nn.Module:
        """Returns the model with kernels for single tokens, as `prepare_generation` returns it."""
        threads = torch.get_num_threads()  # which the choice of kernels depends on
        if self._made is None or self._made[0] != threads:
            made = prepare_prompts(self._model, self._prompt, share_weights=True)
            self._made = (threads, made)
        return with_single_tokens(self._made[1], self._model, dtype)


class GenerationEngine(NamedTuple):
    """How an engine prepares a model of Transformers.

    Attributes:
        dtype: Type of the weights for single tokens.
        kernels: Whether the kernels of torchcram generate, rather than torch.
    """

    dtype: torch.dtype
    kernels: bool

    def prepare(self, model: nn.Module, prompts: PromptKernels) -> nn.Module:
        """Returns the model that generates."""
        return prompts.with_single_tokens(self.dtype) if self.kernels else self._in_torch(model)

    def as_decoded(self, model: nn.Module) -> nn.Module:
        """Returns a model that computes whole windows as the engine computes single tokens.

        Its perplexity is that of what the engine generates.
        """
        if self.kernels and self.dtype != torch.float32:
            return round_for_generation(model, self.dtype)
        return self._in_torch(model)

    @property
    def rounding(self) -> Hashable:
        """Key of what `as_decoded` computes; the same for engines that round in the same way."""
        return (self.dtype, self.kernels and self.dtype != torch.float32)

    def _in_torch(self, model: nn.Module) -> nn.Module:
        return model if self.dtype == torch.float32 else copy.deepcopy(model).to(self.dtype)


TRANSFORMERS_ENGINES = {
    "torch": GenerationEngine(torch.float32, kernels=False),
    "torch-bf16": GenerationEngine(torch.bfloat16, kernels=False),
    "torchcram": GenerationEngine(torch.float32, kernels=True),
    "torchcram-bf16": GenerationEngine(torch.bfloat16, kernels=True),
    "torchcram-int8": GenerationEngine(torch.int8, kernels=True),
    "torchcram-int4": GenerationEngine(INT4, kernels=True),
}
GENERATION_ENGINES = (*TRANSFORMERS_ENGINES, LLAMA_CPP)
