"""What stands for CUDA graphs where there is no GPU."""

from contextlib import nullcontext

from torchcram.optim.graphs import concurrent_passes


class Replayed:
    """Has the interface of `StepGraphs`; every replay runs the body.

    Passes that a GPU would run at the same time run one after the other, with w~ in memory of its
    own as on the GPU.
    """

    made = 0

    def __init__(self, model, optimizer, body, *, concurrent_passes=False):  # noqa: ARG002
        type(self).made += 1
        self._optimizer, self._body, self._concurrent = optimizer, body, concurrent_passes
        self.shared_buffers = set()

    def __call__(self):
        apart = concurrent_passes(self._optimizer, None) if self._concurrent else nullcontext()
        with apart:
            self._body()

    def check(self):
        pass
