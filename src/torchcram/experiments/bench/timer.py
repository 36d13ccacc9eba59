"""Times every engine with every model, in turns, and compares the outputs with eager torch."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from torchcram.experiments.bench.engines import Engine, PreparedRun, UnableError
from torchcram.experiments.bench.record import Times, Timing

if TYPE_CHECKING:
    from torchcram.experiments.bench.candidates import Candidate


Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]

WARM_UP = 2  # rounds that do not count
LEAST = 5  # rounds, however long they take
SAMPLE = 0.005  # seconds that the calls of a turn take together, at least
SHOWN = 160  # characters of what another library says went wrong
NOTICEABLE = 1e-3  # of the largest output


def measure(
    work: Mapping[Key, Work],
    *,
    rounds: int,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, Times]:
    """Times everything in turns, so that whatever else the machine does meets all alike.

    Every turn begins with a call that does not count: threads of the engine before may still be
    waiting for more. Short calls are repeated until they can be timed, and a turn counts with their
    mean. Each round begins with another one.

    Args:
        work: what to call; it returns when it is done.
        rounds: how many count, at most.
        seconds: after which no further round begins, but for the first few.
        clock: in seconds.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds!r} is not a positive number")
    keys = list(work)
    found: dict[Key, list[float]] = {key: [] for key in keys}
    begin = clock()
    for turn in range(WARM_UP + rounds):
        late = seconds is not None and clock() - begin > seconds
        if late and turn >= WARM_UP + LEAST:
            break
        first = turn % max(1, len(keys))
        for key in (*keys[first:], *keys[:first]):
            taken = _sample(work[key], clock)
            if turn >= WARM_UP:
                found[key].append(taken)
    return {key: summary(times) for key, times in found.items()}


def _sample(call: Work, clock: Callable[[], float]) -> float:
    """Returns the milliseconds of a call, the mean over as many as it takes."""
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
    """What there is to time, how far off its outputs are, and what there is to say."""

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
        candidates: the models.
        engines: that run them.
        example: the inputs, on the CPU.
        threads: of each engine.
        setting: place of the setting, for the record.
        rounds: as `measure` has it.
        seconds: likewise.
    """
    with torch_threads(threads):
        if "torch._dynamo" in sys.modules:  # which takes seconds to import
            torch.compiler.reset()  # few versions of a model are kept; none comes again
        found = {
            (candidate.target, engine.name): one
            for candidate in candidates
            for engine, one in _attempts(candidate, engines, example, threads)
        }
        work = {key: one.prepared.run for key, one in found.items() if one.prepared is not None}
        times = measure(work, rounds=rounds, seconds=seconds)
    return [
        Timing(target, engine, setting, times.get((target, engine)), one.error, one.note)
        for (target, engine), one in found.items()
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
    except UnableError as problem:
        return _Attempt(None, None, str(problem))
    except Exception as problem:  # noqa: BLE001  the others go on, whatever it is
        line = (str(problem).strip().splitlines() or [""])[0]
        return _Attempt(None, None, f"{type(problem).__name__}: {line}"[:SHOWN])
    note = prepared.note
    if error > NOTICEABLE:
        off = f"outputs off by {100 * error:.2g} % of the largest"
        note = f"{note}; {off}" if note else off
    return _Attempt(prepared, error, note)


def difference(expected: Tensor, found: object) -> float:
    """Returns the largest difference, as a fraction of the largest finite magnitude.

    Args:
        expected: outputs of eager torch.
        found: those of an engine: a tensor on any device, or an array.

    Raises:
        UnableError: if they are of another shape, or not finite elsewhere.
    """
    given = torch.as_tensor(found).detach().to("cpu", expected.dtype)
    finite = expected.isfinite()
    if given.shape != expected.shape or not bool((given.isfinite() == finite).all()):
        raise UnableError("its outputs are not those of torch")
    if not bool(finite.any()):
        return 0.0
    largest = float(expected[finite].abs().max())
    return float((given - expected)[finite].abs().max()) / max(largest, 1e-30)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Sets the number of threads that torch uses for a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
