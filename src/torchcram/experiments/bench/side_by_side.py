"""Engines and models made ready, compared with eager torch, and timed in turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.experiments.bench.engines import Engine, Ready, UnableError
from torchcram.experiments.bench.record import Timing
from torchcram.experiments.bench.rounds import measure

if TYPE_CHECKING:
    from torchcram.experiments.bench.cases import Case

SHOWN = 160  # characters of what another library says went wrong
NOTICEABLE = 1e-3  # of the largest output


@dataclass(frozen=True)
class _Prepared:
    """What there is to time, how far off its outputs are, and what there is to say."""

    ready: Ready | None
    error: float | None
    note: str


def timings_of(
    cases: Sequence[Case],
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
        cases: the models.
        engines: that run them.
        example: the inputs, on the CPU.
        threads: of each engine.
        setting: place of the setting, for the record.
        rounds: as `measure` has it.
        seconds: likewise.
    """
    with _threads(threads):
        if "torch._dynamo" in sys.modules:  # which takes seconds to import
            torch.compiler.reset()  # few versions of a model are kept; none comes again
        found = {
            (case.target, engine.name): one
            for case in cases
            for engine, one in _prepared(case, engines, example, threads)
        }
        work = {key: one.ready.run for key, one in found.items() if one.ready is not None}
        times = measure(work, rounds=rounds, seconds=seconds)
    return [
        Timing(target, engine, setting, times.get((target, engine)), one.error, one.note)
        for (target, engine), one in found.items()
    ]


def _prepared(
    case: Case, engines: Sequence[Engine], example: Tensor, threads: int
) -> Iterator[tuple[Engine, _Prepared]]:
    with torch.inference_mode():
        expected = case.model(example)
    for engine in engines:
        yield engine, _tried(engine, case, expected, example=example, threads=threads)


def _tried(
    engine: Engine, case: Case, expected: Tensor, *, example: Tensor, threads: int
) -> _Prepared:
    try:
        ready = engine.prepare(case, example, threads)
        error = difference(expected, ready.run())
    except UnableError as problem:
        return _Prepared(None, None, str(problem))
    except Exception as problem:  # noqa: BLE001  the others go on, whatever it is
        line = (str(problem).strip().splitlines() or [""])[0]
        return _Prepared(None, None, f"{type(problem).__name__}: {line}"[:SHOWN])
    note = ready.note
    if error > NOTICEABLE:
        off = f"outputs off by {100 * error:.2g} % of the largest"
        note = f"{note}; {off}" if note else off
    return _Prepared(ready, error, note)


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
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
