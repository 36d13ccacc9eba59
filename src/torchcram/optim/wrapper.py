"""Base class of optimizers that wrap another optimizer and share its groups and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer


class Wrapper(Optimizer):
    """Optimizer that shares parameter groups, state and defaults with `base`.

    Schedulers and checkpoints therefore see a single optimizer.

    Args:
        base: Optimizer that is wrapped.
    """

    capturable_steps: ClassVar[bool] = True
    """Whether the device does the same work at every step, apart from what `before_replay` does."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the base optimizer."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, _: object) -> None:
        pass  # Optimizer.__init__ assigns a list of its own

    @property
    def state(self) -> Any:  # noqa: ANN401
        """State of the base optimizer."""
        return self.base.state

    @state.setter
    def state(self, _: object) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer."""
        if any(param_group is group for group in self.param_groups):
            return  # Optimizer.__init__ adds groups that the base optimizer has already
        self.base.add_param_group(param_group)

    def before_replay(self) -> None:
        """Does what precedes a step that is replayed as a CUDA graph: counts it, selects masks."""

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Leaves out what `before_replay` does, for a `with` block in which steps are captured."""
        yield

    def kept_tensors(self) -> list[Tensor]:
        """Returns the tensors beside the state of the base optimizer that steps change."""
        return []

    def _extra_state(self) -> dict[str, Any]:
        """Returns the entries that the wrapper adds to the state of the base optimizer."""
        return {}

    def _read_extra_state(self, state: dict[str, Any]) -> Callable[[], None]:  # noqa: ARG002
        """Checks the entries of the wrapper in `state`; returns a function that loads them.

        Nothing changes before the function is called. The state of a base optimizer that was never
        wrapped has no such entries.
        """
        return lambda: None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the base optimizer and the entries that the wrapper adds."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {**self.base.state_dict(), **self._extra_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads `state_dict`, of this optimizer or of a base optimizer without the wrapper."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        load_extra_state = self._read_extra_state(state_dict)
        extra = self._extra_state().keys()
        self.base.load_state_dict({k: v for k, v in state_dict.items() if k not in extra})
        load_extra_state()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)
