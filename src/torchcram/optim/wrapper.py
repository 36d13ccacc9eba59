"""An optimizer around another one, whose groups and state are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class Wrapper(Optimizer):
    """Shares groups, state and defaults with `base`, so that schedulers and checkpoints see one.

    Args:
        base: the optimizer inside.
    """

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the base optimizer."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, _: object) -> None:
        pass  # Optimizer.__init__ makes a list of its own

    @property
    def state(self) -> Any:  # noqa: ANN401
        """The state of the base optimizer."""
        return self.base.state

    @state.setter
    def state(self, _: object) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer."""
        if any(param_group is group for group in self.param_groups):
            return  # Optimizer.__init__ adds those of the base, which are there
        self.base.add_param_group(param_group)

    def _extra_state(self) -> dict[str, Any]:
        """Returns what the wrapper adds to the state of the base."""
        return {}

    def _read_extra_state(self, state: dict[str, Any]) -> Callable[[], None]:  # noqa: ARG002
        """Checks what the wrapper has added to `state`, and returns what continues from it.

        Nothing is changed before that is called; the state of a bare base optimizer has nothing.
        """
        return lambda: None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the base optimizer and what the wrapper adds to it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {**self.base.state_dict(), **self._extra_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from `state_dict`; one of the bare base optimizer is welcome, too."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        continue_from_state = self._read_extra_state(state_dict)
        ours = self._extra_state().keys()
        self.base.load_state_dict({k: v for k, v in state_dict.items() if k not in ours})
        continue_from_state()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)
