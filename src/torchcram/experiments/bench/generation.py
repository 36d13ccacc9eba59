"""Generation of text in a benchmark: the time of the prompt, and of every token after it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from torchcram.experiments.bench.engines import UnableError
from torchcram.experiments.bench.generators import (
    LLAMA_CPP,
    TRANSFORMERS_ENGINES,
    Generator,
    LlamaCppGenerator,
    LlamaCppScores,
    PromptKernels,
    Seconds,
    TransformersGenerator,
)
from torchcram.experiments.bench.record import Generation, GenerationTiming, GgufFile, Times
from torchcram.experiments.bench.timer import (
    difference,
    failure,
    summary,
    take_turns,
    torch_threads,
    with_error,
)
from torchcram.experiments.models.causal import CausalModel

if TYPE_CHECKING:
    from torchcram.experiments.bench.candidates import Candidate
    from torchcram.experiments.io.cache import Report
    from torchcram.experiments.tasks import Dataset, Task

PROMPT = 128  # tokens
TOKENS = 64  # single ones after the prompt
SCORED = 2048  # test tokens that the perplexities are of
FORCED = 8  # tokens whose scores are compared with those of eager torch
CPU = torch.device("cpu")


class Lengths(NamedTuple):
    """Numbers of tokens: those of the prompt, and those that are timed after it."""

    prompt: int
    tokens: int


class Limits(NamedTuple):
    """Largest number of timed rounds, and seconds after which no further one begins, if any."""

    rounds: int
    seconds: float | None


@dataclass(frozen=True)
class GenerationPlan:
    """The measurements of generation.

    Attributes:
        engines: Names of the engines.
        prompt: Number of tokens of the prompt; None for 128, or fewer where the model takes fewer.
        tokens: Number of tokens after it; None for 64, or fewer where the model takes fewer.
        gguf: Files that llama.cpp generates with.
        scored: Number of tokens of the test text that perplexities are measured on; None to measure
            none.
    """

    engines: tuple[str, ...] = ()
    prompt: int | None = None
    tokens: int | None = None
    gguf: tuple[Path, ...] = ()
    scored: int | None = SCORED

    def __post_init__(self) -> None:
        for key, least in (("prompt", 1), ("tokens", 1), ("scored", 2)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"{key} {value}: allowed are numbers from {least} up")
        names = [path.name for path in self.gguf]
        for path in self.gguf:
            if names.count(path.name) > 1:
                raise ValueError(f"{path}: another GGUF file has the same name")
            if not path.is_file():
                raise ValueError(f"{path}: there is no such file")
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ValueError(f"{path} is not a GGUF file")

    def lengths(self, positions: int | None) -> Lengths:
        """Returns the numbers of tokens for a model.

        Args:
            positions: Largest number of tokens that the model takes; None for any.

        Raises:
            ValueError: If it takes fewer than were asked for.
        """
        prompt, tokens = self.prompt or PROMPT, self.tokens or TOKENS
        if positions is None:
            return Lengths(prompt, tokens)
        if self.tokens is None:
            room = positions // 3 if self.prompt is None else positions - prompt
            tokens = max(1, min(tokens, room))
        if self.prompt is None:
            prompt = max(1, min(prompt, positions - tokens))
        if prompt + tokens > positions:
            raise ValueError(
                f"a prompt of {prompt} tokens and {tokens} after it: the model takes at most "
                f"{positions} tokens together"
            )
        return Lengths(prompt, tokens)


@dataclass(frozen=True, eq=False)
class _Row:
    """An engine with one of the models.

    Attributes:
        target: Target of the model, or the name of a GGUF file.
        engine: Name of the engine.
        prepare: Function that prepares the model for a number of threads.
        reference: Model whose scores in eager torch those of the engine are compared with, if any.
        scorer: Function that returns the model to measure the perplexity of, for a number of
            threads; None where it cannot be measured.
        scored_as: Key of the perplexity; rows with equal keys have the same one.
    """

    target: str
    engine: str
    prepare: Callable[[int], Generator]
    reference: nn.Module | None
    scorer: Callable[[int], nn.Module] | None
    scored_as: Hashable


def measure_generation(
    candidates: Sequence[Candidate],
    task: Task,
    data: Dataset,
    *,
    plan: GenerationPlan,
    threads: Sequence[int],
    limits: Limits,
    report: Report,
) -> Generation:
    """Times every engine that generates with every model, in turns, on one sequence.

    A model that an engine cannot run has a note instead of times.

    Args:
        candidates: Models to run, which are `CausalModel`s.
        task: Task of the models.
        data: Dataset whose test text begins with the prompt.
        plan: Measurements to make.
        threads: Numbers of threads.
        limits: Number of rounds, and time for them.
        report: Function that is called with a line of text before slow work.

    Raises:
        ValueError: If the model or the test text is too short for the prompt.
    """
    model = causal_model(candidates[0])
    lengths = plan.lengths(model.positions)
    prompt = task.prompt(data, lengths.prompt)
    window = int(task.example(data, 1).shape[1])
    rows = [
        *(row for candidate in candidates for row in _rows(candidate, plan.engines, prompt)),
        *(_gguf_row(path, lengths, window, model.vocabulary) for path in plan.gguf),
    ]
    timings: list[GenerationTiming] = []
    files = f"; {', '.join(path.name for path in plan.gguf)}" if plan.gguf else ""
    for count in threads:
        plural = "" if count == 1 else "s"
        report(
            f"generation, {count} thread{plural}: a prompt of {lengths.prompt} tokens and "
            f"{lengths.tokens} after it, {len(candidates)} models with {len(plan.engines)} "
            f"engines, side by side{files}"
        )
        with torch_threads(count):
            timings += _times(rows, prompt, lengths, count, limits)
    scored = None
    if plan.scored is not None:
        short, scored = task.shorten_test(data, plan.scored)
        batches = task.batches(short, train=False, batch_size=1, device=CPU, seed=0)
        ran = {(timing.target, timing.engine) for timing in timings if timing.token is not None}
        values: dict[Hashable, float] = {}
        with torch_threads(max(threads)):
            for row in rows:
                known = row.scored_as in values
                if row.scorer is not None and not known and (row.target, row.engine) in ran:
                    report(f"perplexity of {row.target} with {row.engine} on {scored} tokens")
                    scorer = row.scorer(max(threads))
                    values[row.scored_as] = task.score(scorer, short, batches, device=CPU).value
        keys = {(row.target, row.engine): row.scored_as for row in rows}
        timings = [
            replace(timing, perplexity=values.get(keys[timing.target, timing.engine]))
            if timing.token is not None
            else timing
            for timing in timings
        ]
    return Generation(
        prompt_tokens=lengths.prompt,
        new_tokens=lengths.tokens,
        scored_tokens=scored,
        timings=tuple(timings),
        files=tuple(GgufFile(path.name, path.stat().st_size) for path in plan.gguf),
    )


def causal_model(candidate: Candidate) -> CausalModel:
    """Returns the model of a candidate.

    Raises:
        ValueError: If it does not generate.
    """
    if not isinstance(candidate.model, CausalModel):
        raise ValueError(f"{type(candidate.model).__name__} does not generate text")
    return candidate.model


def _rows(candidate: Candidate, names: Sequence[str], prompt: Tensor) -> list[_Row]:
    prompts = PromptKernels(causal_model(candidate).model, prompt)
    return [_row(candidate, name, prompts) for name in names]


def _row(candidate: Candidate, name: str, prompts: PromptKernels) -> _Row:
    engine, inner = TRANSFORMERS_ENGINES[name], causal_model(candidate).model

    def prepare(threads: int) -> Generator:  # noqa: ARG001  torch has been set to them
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the note says that there are no kernels
            try:
                return TransformersGenerator(engine.prepare(inner, prompts))
            except (RuntimeError, ValueError) as error:  # no kernels, or none for the model
                raise UnableError(str(error)) from None

    def scorer(threads: int) -> nn.Module:  # noqa: ARG001
        return CausalModel(engine.as_decoded(inner))

    return _Row(
        target=candidate.target,
        engine=name,
        prepare=prepare,
        reference=inner,
        scorer=scorer if candidate.trained else None,
        scored_as=(candidate.target, engine.rounding),
    )


def _gguf_row(path: Path, lengths: Lengths, window: int, vocabulary: int) -> _Row:
    def prepare(threads: int) -> Generator:
        context = lengths.prompt + lengths.tokens + 1
        return LlamaCppGenerator(path, threads=threads, context=context, vocabulary=vocabulary)

    def scorer(threads: int) -> nn.Module:
        return LlamaCppScores(path, threads=threads, context=window, vocabulary=vocabulary)

    return _Row(
        target=path.name,
        engine=LLAMA_CPP,
        prepare=prepare,
        reference=None,
        scorer=scorer,
        scored_as=path.name,
    )


class _Attempt(NamedTuple):
    """An engine's attempt to prepare a model: the result, the error of its scores, and a note."""

    generator: Generator | None
    error: float | None
    note: str


def _times(
    rows: Sequence[_Row], prompt: Tensor, lengths: Lengths, threads: int, limits: Limits
) -> Iterator[GenerationTiming]:
    forced = prompt[:, : min(lengths.tokens, FORCED)]
    expected: dict[str, Tensor] = {}  # scores of eager torch by target
    for row in rows:
        if row.reference is not None and row.target not in expected:
            eager = TransformersGenerator(row.reference)
            expected[row.target] = eager.next_scores(prompt, forced)
    attempts = [_attempt(row, prompt, forced, expected.get(row.target), threads) for row in rows]
    samplers = {
        index: partial(_sample, attempt.generator, prompt, lengths.tokens)
        for index, attempt in enumerate(attempts)
        if attempt.generator is not None
    }
    samples = take_turns(samplers, rounds=limits.rounds, warm_up=1, seconds=limits.seconds)
    for index, (row, attempt) in enumerate(zip(rows, attempts, strict=True)):
        taken = samples.get(index, [])
        yield GenerationTiming(
            target=row.target,
            engine=row.engine,
            threads=threads,
            prompt=_milliseconds([sample.prompt for sample in taken]),
            token=_milliseconds([sample.token for sample in taken]),
            error=attempt.error,
            note=attempt.note,
        )


def _attempt(
    row: _Row, prompt: Tensor, forced: Tensor, expected: Tensor | None, threads: int
) -> _Attempt:
    try:
        generator = row.prepare(threads)
        generator.generate(prompt, 1)
        scores = generator.next_scores(prompt, forced)
        if scores is None or expected is None:
            return _Attempt(generator, None, generator.note)
        error = difference(expected, scores)
    except Exception as problem:  # noqa: BLE001  the other engines go on, whatever it is
        return _Attempt(None, None, failure(problem))
    return _Attempt(generator, error, with_error(generator.note, error))


def _sample(generator: Generator, prompt: Tensor, tokens: int) -> Seconds:
    generator.generate(prompt, 1)  # threads of the previous engine may still be spinning
    return generator.generate(prompt, tokens)


def _milliseconds(seconds: Sequence[float]) -> Times | None:
    return summary([1000 * value for value in seconds]) if seconds else None
