"""Inputs of layers that are pruned one after another, each fed by the pruned layers before it.

A pass over the whole model for each layer would give them, and takes hundreds of passes for a
language model. Instead, a stack of blocks, such as the layers of a transformer, keeps the hidden
states between two blocks: only the block whose layers are pruned runs again, and its output is the
input of the next one. Layers that share an input, such as those of q, k and v, take one run
together. A stack that is not such a chain, or a layer outside of it, takes passes over the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchcram.layers import some_of
from torchcram.passes import eval_mode
from torchcram.pruners.activations import first_input, layers_of, products

if TYPE_CHECKING:
    from torchcram.pruners.base import Calibration
    from torchcram.weights import Weights

HIDDEN = "hidden_states"  # name of the first argument in blocks of Transformers
CLOSE = 1e-4  # relative difference that rounding may cause when a block runs again
NUDGE = 1.01  # factor that shows which arguments of a block depend on the blocks before it
PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))

Groups = list[list[str]]
"""Names of weights in the order of the forward pass; a group shares one input."""


def products_in_order(calibration: Calibration, weights: Weights) -> Iterator[dict[str, Tensor]]:
    """Yields X X^T of all layers, group by group in the order of the forward pass.

    The layers of a group share one input. The caller prunes them before it takes the next group,
    whose inputs are those that the pruned layers produce.

    Args:
        calibration: Model and batches.
        weights: Weights of the layers.
    """
    groups = _groups(calibration, weights)
    stacks = list(_stacks(calibration.model, weights))
    while groups:
        stack = next((each for each in stacks if each.count_leading(groups) > 1), None)
        count = 1 if stack is None else stack.count_leading(groups)
        chain = None if stack is None else _record(calibration, stack, groups[:count], weights)
        if chain is not None:
            yield from chain
            groups = groups[count:]
            continue
        if stack is not None:
            stacks.remove(stack)
        yield products(calibration, some_of(weights, groups[0]))
        groups = groups[1:]


def _groups(calibration: Calibration, weights: Weights) -> Groups:
    """Returns the weights in the order of their first use, together where they share an input."""
    calls: Counter[str] = Counter()
    leaders: dict[str, set[str]] = {}  # first layer that got the same input, for every call
    last: tuple[Tensor, int | None, str] | None = None

    def note(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        nonlocal last
        inputs = first_input(args, kwargs)
        version = None if inputs.is_inference() else inputs._version
        same = last is not None and last[0] is inputs and last[1] == version
        leader = last[2] if same and last is not None else name
        last = (inputs, version, leader)
        leaders.setdefault(name, set()).add(leader)
        calls[name] += 1

    with ExitStack() as hooks:
        for name, layers in layers_of(calibration.model, weights).items():
            for layer in layers:
                hook = layer.register_forward_pre_hook(partial(note, name), with_kwargs=True)
                hooks.callback(hook.remove)
        batches = calibration.run()
    groups: dict[str, list[str]] = {}
    for name, known in leaders.items():
        (leader, *others) = known
        alone = others or max(calls[name], calls[leader]) > batches or leader not in groups
        groups.setdefault(name if alone else leader, []).append(name)
    reached = list(groups.values())
    missed = [[name] for name in weights if name not in leaders]  # `products` names them
    return reached + missed


@dataclass(frozen=True, eq=False)
class _Stack:
    """Blocks of a container that may run one after another.

    Attributes:
        blocks: Blocks in the order of the container.
        block_of: Number of the block that a weight is in, of those that no other module uses.
    """

    blocks: Sequence[nn.Module]
    block_of: Mapping[str, int]

    def count_leading(self, groups: Groups) -> int:
        """Returns how many of the first groups are in the stack, block after block."""
        count, before = 0, 0
        for group in groups:
            places = {self.block_of.get(name, -1) for name in group}
            if len(places) > 1 or max(places) < before:
                break
            count, before = count + 1, max(places)
        return count


def _stacks(model: nn.Module, weights: Weights) -> Iterator[_Stack]:
    """Yields the outermost containers with weights in more than one block."""
    users = layers_of(model, weights)
    inside: set[int] = set()
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or id(container) in inside:
            continue
        blocks = list(container)
        owners: dict[int, set[int]] = {}
        for number, block in enumerate(blocks):
            for part in block.modules():
                owners.setdefault(id(part), set()).add(number)
        block_of = {}
        for name, layers in users.items():
            places = [owners.get(id(layer), {-1}) for layer in layers]
            if len(numbers := set().union(*places)) == 1 and (number := min(numbers)) >= 0:
                block_of[name] = number
        if len(set(block_of.values())) > 1:
            inside.update(id(part) for part in container.modules())
            yield _Stack(blocks, block_of)


@dataclass(frozen=True, eq=False)
class _Call:
    """Arguments of a block but for the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_name: bool

    @staticmethod
    def split(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, _Call] | None:
        """Returns the hidden states and the other arguments, if they can be told apart."""
        hidden = args[0] if args else kwargs.get(HIDDEN)
        if not isinstance(hidden, Tensor) or hidden.is_nested or hidden.is_inference():
            return None
        others = {name: value for name, value in kwargs.items() if args or name != HIDDEN}
        return hidden, _Call(args[1:], others, by_name=not args)

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Returns the hidden states after the block."""
        named = {HIDDEN: hidden} if self.by_name else {}
        args = () if self.by_name else (hidden, *self.args)
        output: Tensor = _hidden(block(*args, **named, **self.kwargs))
        return output

    def equals(self, other: _Call) -> bool:
        """Returns whether the values are plain or tensors, and the same."""
        return _equal((self.args, dict(self.kwargs)), (other.args, dict(other.kwargs)))


@dataclass(eq=False)
class _Recorder:
    """Hooks that note the calls of the blocks of a stack while a model runs.

    Attributes:
        blocks: Blocks in the order in which they have to run.
        nudge: Factor of what the blocks return; None to leave it as it is.
        hidden: Hidden states before the first block, for every batch, and their versions.
        calls: Arguments of every block, for every batch.
        output: Hidden states after the last block, of the first batch.
        autocast: Type of device, dtype and whether autocast is on.
        is_chain: Whether every block got what the block before it returned.
    """

    blocks: Sequence[nn.Module]
    nudge: float | None = None
    hidden: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    calls: list[list[_Call]] = field(default_factory=list)
    output: Tensor | None = None
    autocast: tuple[str, torch.dtype, bool] = ("cpu", torch.bfloat16, False)
    is_chain: bool = True

    def __enter__(self) -> _Recorder:
        self._next, self._last = 0, None
        self._hooks = ExitStack()
        for number, block in enumerate(self.blocks):
            before = block.register_forward_pre_hook(
                partial(self._before, number), with_kwargs=True
            )
            self._hooks.callback(before.remove)
            self._hooks.callback(block.register_forward_hook(self._after).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self.is_chain &= all(len(calls) == len(self.blocks) for calls in self.calls)

    def _before(self, number: int, _: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        split = _Call.split(args, kwargs)
        if split is None or number != self._next:
            self.is_chain = False
            return
        hidden, call = split
        if number == 0:
            device = hidden.device.type
            enabled = torch.is_autocast_enabled(device)
            self.autocast = (device, torch.get_autocast_dtype(device), enabled)
            self.hidden.append(hidden)
            self.versions.append(hidden._version)
            self.calls.append([])
        elif hidden is not self._last:
            self.is_chain = False
        if self.calls:
            self.calls[-1].append(call)

    def _after(self, _: nn.Module, __: Any, output: Any) -> Any:  # noqa: ANN401
        if self.nudge is not None:
            output = _nudged(output, self.nudge)
        self._next = (self._next + 1) % len(self.blocks)
        self._last = _hidden(output)
        if self._next == 0 and len(self.calls) == 1:
            self.output = self._last
        return output

    def is_untouched(self) -> bool:
        """Returns whether no hidden states were changed in place after the block had got them."""
        return all(
            hidden._version == version
            for hidden, version in zip(self.hidden, self.versions, strict=True)
        )


def _record(
    calibration: Calibration, stack: _Stack, groups: Groups, weights: Weights
) -> Iterator[dict[str, Tensor]] | None:
    """Runs the model once; returns what yields X X^T block by block, or None for no chain.

    Args:
        calibration: Model and batches.
        stack: Stack with the layers of the groups.
        groups: Names of weights, block after block.
        weights: Weights by name.
    """
    numbers = [stack.block_of[group[0]] for group in groups]
    first = numbers[0]
    blocks = stack.blocks[first : numbers[-1] + 1]
    with _Recorder(blocks) as recorder:
        calibration.run()
    if not recorder.is_chain or not recorder.hidden or not recorder.is_untouched():
        return None
    if not _is_repeatable(calibration, recorder) or not _are_calls_independent(calibration, blocks):
        return None
    placed = [(number - first, group) for number, group in zip(numbers, groups, strict=True)]
    return _run_blocks(calibration, recorder, placed, weights)


def _run_blocks(
    calibration: Calibration,
    recorder: _Recorder,
    groups: Sequence[tuple[int, list[str]]],
    weights: Weights,
) -> Iterator[dict[str, Tensor]]:
    """Yields X X^T of groups, whose blocks run on the hidden states that the ones before left."""
    for number, block in enumerate(recorder.blocks):
        run = partial(_run_block, calibration, recorder, number)
        for owner, group in groups:
            if owner == number:
                yield products(calibration, some_of(weights, group), run)
        if block is not recorder.blocks[-1]:
            run(keep=True)


def _run_block(
    calibration: Calibration, recorder: _Recorder, number: int, *, keep: bool = False
) -> None:
    """Runs a block on all batches; keeps its outputs as the hidden states, if asked to."""
    with _as_recorded(calibration, recorder):
        for n, hidden in enumerate(recorder.hidden):
            output = recorder.calls[n][number].run(recorder.blocks[number], hidden)
            if keep:
                recorder.hidden[n] = output


@contextmanager
def _as_recorded(calibration: Calibration, recorder: _Recorder) -> Iterator[None]:
    """Runs blocks in a `with` block as they ran in the model."""
    device, dtype, enabled = recorder.autocast
    torch.clear_autocast_cache()  # it may hold copies of earlier weights
    with torch.no_grad(), eval_mode(calibration.model), torch.autocast(device, dtype, enabled):
        yield


def _is_repeatable(calibration: Calibration, recorder: _Recorder) -> bool:
    """Returns whether the blocks, run by themselves, return what they did inside the model."""
    hidden = recorder.hidden[0]
    with _as_recorded(calibration, recorder):
        for call, block in zip(recorder.calls[0], recorder.blocks, strict=True):
            version, before = hidden._version, hidden
            try:
                hidden = call.run(block, before)
            except Exception:  # noqa: BLE001  it needs what only the model prepares
                return False
            has_weights = any(True for _ in block.parameters())
            if not isinstance(hidden, Tensor) or (has_weights and before._version != version):
                return False
    expected = recorder.output
    if expected is None or expected.shape != hidden.shape:
        return False
    difference, size = (hidden - expected).float().norm(), expected.float().norm()
    return bool(difference <= CLOSE * size)


def _are_calls_independent(calibration: Calibration, blocks: Sequence[nn.Module]) -> bool:
    """Returns whether the other arguments of all blocks stay the same when the outputs change."""
    batch = next(iter(calibration.batches))
    recorders = []
    for nudge in (None, NUDGE):
        with _Recorder(blocks, nudge) as recorder:
            calibration.run([batch])
        recorders.append(recorder)
    plain, nudged = ([call for calls in each.calls for call in calls] for each in recorders)
    return len(plain) == len(nudged) and all(map(_Call.equals, plain, nudged))


def _hidden(output: Any) -> Any:  # noqa: ANN401
    """Returns the hidden states among what a block returns."""
    return output[0] if isinstance(output, (tuple, list)) and output else output


def _nudged(output: Any, factor: float) -> Any:  # noqa: ANN401
    """Returns the output of a block with all floating-point tensors multiplied."""
    if isinstance(output, Tensor):
        return output * factor if output.is_floating_point() else output
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        return tuple(_nudged(value, factor) for value in output)
    if isinstance(output, list):
        return [_nudged(value, factor) for value in output]
    return output


def _equal(value: Any, other: Any) -> bool:  # noqa: ANN401
    """Returns whether two values are equal and made of tensors and plain values alone."""
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value, other)
    if type(value) is not type(other):
        return False
    if isinstance(value, (tuple, list)):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(_equal(value[key], other[key]) for key in value)
    return isinstance(value, PLAIN) and bool(value == other)
