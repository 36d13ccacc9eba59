"""Work that takes turns and is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from torchcram.experiments.bench.record import Times

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]

WARM_UP = 2  # rounds that do not count
LEAST = 5  # rounds, however long they take
SAMPLE = 0.005  # seconds that the calls of a turn take together, at least


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
