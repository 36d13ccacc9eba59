"""The nets of the demonstration as files, and how fast they run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram import compressible_weights, parse_operator
from torchcram.experiments.bench.candidates import Candidate
from torchcram.experiments.bench.engines import Runtime, Torch
from torchcram.experiments.bench.record import DENSE
from torchcram.experiments.bench.run import Files
from torchcram.experiments.bench.timer import timings_of
from torchcram.experiments.demo_result import Deployed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.bench.record import Timing

ROUNDS = 15


def deploy(models: Mapping[str, nn.Module], images: Tensor) -> tuple[Deployed, ...]:
    """Writes every net to a compact file, and times it in torch and in the runtime, in turns.

    Args:
        models: by operator; "dense" is as trained.
        images: a batch to run them on, in one thread.
    """
    candidates = [
        Candidate(
            target,
            model.eval(),
            None if target == DENSE else parse_operator(target),
            compressible_weights(model),
            None,
        )
        for target, model in models.items()
    ]
    engines = (Torch(), Runtime())
    timings = timings_of(
        candidates, engines, images, threads=1, setting=0, rounds=ROUNDS, seconds=None
    )
    found = {(one.target, one.engine): one for one in timings}
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder))
        return tuple(
            Deployed(
                operator=candidate.target,
                plain_bytes=files.plain_bytes(candidate),
                compact_bytes=files.compact_bytes(candidate),
                torch_ms=_median(found[candidate.target, engines[0].name]),
                runtime_ms=_median(found[candidate.target, engines[1].name]),
                note=found[candidate.target, engines[1].name].note,
            )
            for candidate in candidates
        )


def _median(timing: Timing) -> float | None:
    return None if timing.times is None else timing.times.median
