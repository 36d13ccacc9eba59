"""Times every engine with every model, in turns, and compares the outputs with eager torch."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from torchcram.experiments.bench.engines import Engine, PreparedRun, UnableError, Work
from torchcram.experiments.bench.record import Times, Timing
from torchcram.runtime.outputs import tensor_error

if TYPE_CHECKING:
    from torchcram.experiments.bench.candidates import Candidate

Key = TypeVar("Key", bound=Hashable)
Sample = TypeVar("Sample")

WARM_UP = 2  # rounds that do not count
LEAST = 5  # rounds, however long they take
SAMPLE = 0.005  # seconds that the calls of a turn take together, at least
SHOWN = 160  # characters of the message of an unexpected error
NOTICEABLE = 1e-3  # error, relative to the largest output, that the note mentions


def measure(
    work: Mapping[Key, Work],
    *,
    rounds: int,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, Times]:
    """Times functions in turns, so that other load on the machine affects all of them alike.

    Every turn begins with a call that does not count, because threads of the previous engine may
    still be spinning. Short calls are repeated until they can be timed, and their mean counts. Each
    round begins with another function.

    Args:
        work: Functions to time, which return when they are done.
        rounds: Largest number of rounds that count.
        seconds: Time after which no further round begins, except the first few.
        clock: Function that returns the time in seconds.

    Raises:
        ValueError: If `rounds` is not positive.
    """
    samplers = {key: partial(_sample, call, clock) for key, call in work.items()}
    samples = take_turns(samplers, rounds=rounds, seconds=seconds, clock=clock)
    return {key: summary(times) for key, times in samples.items()}


def take_turns(
    samplers: Mapping[Key, Callable[[], Sample]],
    *,
    rounds: int,
    warm_up: int = WARM_UP,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[Sample]]:
    """Calls functions in turns and returns what each returned, a value for every round.

    Args:
        samplers: Functions that measure something.
        rounds: Largest number of rounds that count.
        warm_up: Number of rounds before them.
        seconds: Time after which no further round begins, except the first few.
        clock: Function that returns the time in seconds.

    Raises:
        ValueError: If `rounds` is not positive.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds!r} is not a positive number")
    keys = list(samplers)
    samples: dict[Key, list[Sample]] = {key: [] for key in keys}
    begin = clock()
    for turn in range(warm_up + rounds):
        late = seconds is not None and clock() - begin > seconds
        if late and turn >= warm_up + LEAST:
            break
        first = turn % max(1, len(keys))
        for key in (*keys[first:], *keys[:first]):
            sample = samplers[key]()
            if turn >= warm_up:
                samples[key].append(sample)
    return samples


def _sample(call: Work, clock: Callable[[], float]) -> float:
    """Returns the milliseconds of a call, the mean over as many calls as it takes."""
    call()
    count, begin = 0, clock()
    while True:
        call()
        count += 1
        taken = clock() - begin
        if taken >= SAMPLE:
            return 1000 * taken / count


def summary(times: Sequence[float]) -> Times:
    """Returns the median and the quartiles of at least one value."""
    if len(times) == 1:
        return Times(times[0], times[0], times[0], 1)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Times(median, low, high, len(times))


@dataclass(frozen=True)
class _Attempt:
    """An engine's attempt to prepare a model: the run, the error of its outputs, and a note."""

    prepared: PreparedRun | None
    error: float | None
    note: str


def timings_of(
    candidates: Sequence[Candidate],
    engines: Sequence[Engine],
    example: Tensor,
    *,
    threads: int,
    setting: int,
    rounds: int,
    seconds: float | None,
) -> list[Timing]:
    """Times every engine with every model.

    Args:
        candidates: Models to run.
        engines: Engines that run them.
        example: Inputs, on the CPU.
        threads: Number of threads of each engine.
        setting: Index of the setting, for the record.
        rounds: Largest number of timed rounds.
        seconds: Time after which no further round begins; see `measure`.
    """
    with torch_threads(threads):
        if "torch._dynamo" in sys.modules:  # which takes seconds to import
            torch.compiler.reset()  # few versions of a model are kept, and none is used again
        attempts = {
            (candidate.target, engine.name): attempt
            for candidate in candidates
            for engine, attempt in _attempts(candidate, engines, example, threads)
        }
        work = {key: a.prepared.run for key, a in attempts.items() if a.prepared is not None}
        times = measure(work, rounds=rounds, seconds=seconds)
    return [
        Timing(*key, setting, times.get(key), attempt.error, attempt.note)
        for key, attempt in attempts.items()
    ]


def _attempts(
    candidate: Candidate, engines: Sequence[Engine], example: Tensor, threads: int
) -> Iterator[tuple[Engine, _Attempt]]:
    with torch.inference_mode():
        expected = candidate.model(example)
    for engine in engines:
        yield engine, _attempt(engine, candidate, expected, example=example, threads=threads)


def _attempt(
    engine: Engine, candidate: Candidate, expected: Tensor, *, example: Tensor, threads: int
) -> _Attempt:
    try:
        prepared = engine.prepare(candidate, example, threads)
        error = difference(expected, prepared.run())
    except Exception as problem:  # noqa: BLE001  the other engines go on, whatever it is
        return _Attempt(None, None, failure(problem))
    return _Attempt(prepared, error, with_error(prepared.note, error))


def failure(problem: Exception) -> str:
    """Returns why an engine cannot run a model, in one line."""
    if isinstance(problem, UnableError):
        return str(problem)
    line = (str(problem).strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {line}"[:SHOWN]


def with_error(note: str, error: float) -> str:
    """Returns a note that also tells the error of the outputs where it is noticeable."""
    if error <= NOTICEABLE:
        return note
    off = f"outputs off by {100 * error:.2g} % of the largest"
    return f"{note}; {off}" if note else off


def difference(expected: Tensor, outputs: object) -> float:
    """Returns the largest difference, as a fraction of the largest finite magnitude.

    Args:
        expected: Outputs of eager torch.
        outputs: Outputs of an engine: a tensor on any device, or an array.

    Raises:
        UnableError: If the shapes differ, or other elements are not finite.
    """
    error = tensor_error(expected, torch.as_tensor(outputs).detach().to("cpu", expected.dtype))
    if math.isinf(error.error):
        raise UnableError("its outputs are not those of torch")
    return error.relative


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Sets the number of threads that torch uses for a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
