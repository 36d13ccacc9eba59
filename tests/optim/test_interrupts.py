"""Whatever ends a step, wherever: w comes back bit for bit, and the optimizer goes on."""

import copy
import pickle
import sys
from contextlib import suppress

import pytest
import torch
from nets import RULES, closure_for, same, snapshot
from replayed import apart
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from torchcram import C_SAM, CRAM_PLUS, CrAM
from torchcram.optim.step_state import Backup, UndoStack

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


class FaultError(Exception):
    """What is injected."""


class FaultAt(TorchDispatchMode):
    """Fails at operation `number` and the next `more`; of a list of tensors, after half of it."""

    def __init__(self, number, more=0):
        super().__init__()
        self.first, self.last, self.count = number, number + more, -1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.first <= self.count <= self.last:
            if "_foreach_" in str(func) and len(args[0]) > 1:
                half = len(args[0]) // 2
                func(*(a[:half] if isinstance(a, list) else a for a in args), **(kwargs or {}))
            raise FaultError(str(func))
        return func(*args, **(kwargs or {}))


def build(rule=CRAM_PLUS, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(5, 8), torch.randint(4, (5,))
    optimizer = CrAM(model, base, ["global:0.5"], rule=rule, **{"rho": 0.1, **options})
    return model, optimizer, closure_for(model, optimizer, batch)


def parameters(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class Watched:
    """A model and its optimizer, whose step is to be interrupted."""

    def __init__(self, rule, **options):
        self.model, self.optimizer, self.closure = build(rule, **options)
        self.optimizer.base.register_step_pre_hook(self.begin)
        self.go_on()

    def begin(self, *_):
        self.stepping = True  # the base optimizer begins to change w

    def go_on(self):
        """Takes a step, and gets ready for the next one to be interrupted."""
        self.optimizer.step(self.closure)
        self.stepping = False
        self.before = parameters(self.model)

    def check(self):
        """Checks that w is back, and that the next step can be taken."""
        assert self.model[1].track_running_stats
        if not self.stepping:
            assert same(parameters(self.model), self.before)
        self.go_on()
        assert self.optimizer._step_state.g is None
        assert not self.optimizer._undo._calls
        assert all(torch.isfinite(p).all() for p in self.model.parameters())


@rules
def test_a_fault_at_every_operation(rule):
    number, reached = 0, True
    watched = Watched(rule, mask_interval=3 if rule is CRAM_PLUS else 1)
    while reached:
        with suppress(FaultError), FaultAt(number) as mode:
            watched.optimizer.step(watched.closure)
        reached = mode.count >= number
        watched.check()
        number += 1
    assert number > 40


def test_a_fault_at_every_operation_with_the_point_in_memory_of_its_own():
    number, reached = 0, True
    watched = Watched(CRAM_PLUS, rho=0.0, mask_interval=3)
    pointers = [p.data_ptr() for p in watched.model.parameters()]
    while reached:
        with suppress(FaultError), apart(watched.optimizer), FaultAt(number) as mode:
            watched.optimizer.step(watched.closure)
        reached = mode.count >= number
        watched.check()
        assert [p.data_ptr() for p in watched.model.parameters()] == pointers
        number += 1
    assert number > 40


@pytest.mark.parametrize("rule", [CRAM_PLUS, C_SAM], ids=lambda rule: rule.name)
def test_faults_that_last_while_w_is_put_back(rule):
    number, reached, away = 0, True, 0
    watched = Watched(rule)
    while reached:
        with suppress(FaultError), FaultAt(number, more=2) as mode:
            watched.optimizer.step(watched.closure)
        reached = mode.count >= number
        if not watched.stepping and not same(parameters(watched.model), watched.before):
            away += 1
            watched.optimizer.restore()
        watched.check()
        number += 1
    assert away  # there are such states, and the way out of them was taken


@pytest.mark.parametrize(
    "enter", ["step", "compressed", "state_dict", "compress", "pickle", "load"]
)
def test_every_way_in_begins_with_putting_w_back(enter, monkeypatch):
    watched = Watched(CRAM_PLUS)
    state = watched.optimizer.state_dict()
    faults = [FaultError, FaultError]  # at the end of the block, and once more because that failed
    restore = Backup.restore

    def fails(self):
        if faults:
            raise faults.pop()
        restore(self)

    monkeypatch.setattr(Backup, "restore", fails)
    with pytest.raises(FaultError):
        watched.optimizer.step(watched.closure)
    assert not faults
    assert not same(parameters(watched.model), watched.before)
    optimizer = watched.optimizer
    if enter == "step":
        with pytest.raises(RuntimeError, match="no compressed pass went before"):
            optimizer.step()
    elif enter == "compressed":
        with optimizer.compressed():
            watched.closure()
    elif enter == "state_dict":
        optimizer.state_dict()
    elif enter == "compress":
        optimizer.compress("global:0.9")
    elif enter == "pickle":
        pickle.dumps(optimizer)
    else:
        optimizer.load_state_dict(state)
    assert same(parameters(watched.model), watched.before)
    watched.check()


@pytest.mark.parametrize("rule", [CRAM_PLUS, C_SAM], ids=lambda rule: rule.name)
def test_ctrl_c_on_every_line(rule):
    own = ("torchcram/optim", "torchcram/batchnorm", "/contextlib.py")

    def interrupt_at(number, call):
        """Calls, raises KeyboardInterrupt at line `number`, and returns how many lines came."""
        seen = 0

        def trace(frame, event, _):
            nonlocal seen
            if not any(part in frame.f_code.co_filename for part in own):
                return None
            if event == "line":
                seen += 1
                if seen == number:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return seen

    number, watched = 1, Watched(rule)
    while True:
        seen = interrupt_at(number, lambda: watched.optimizer.step(watched.closure))
        watched.check()
        if seen < number:
            break
        number += 1
    assert number > 100


def block_with(call, model, optimizer, closure):
    """A compressed pass that makes `call` inside, and goes on whatever that says."""
    before = parameters(model)
    with optimizer.compressed():
        with suppress(RuntimeError):
            call()
        assert same(parameters(model), before)
        closure()


@pytest.mark.parametrize("name", ["deepcopy", "pickle", "load_state_dict", "step", "compressed"])
def test_what_is_refused_inside_a_block_ends_it(name):
    model, optimizer, closure = build()
    state = optimizer.state_dict()
    calls = {
        "deepcopy": lambda: copy.deepcopy(optimizer),
        "pickle": lambda: pickle.dumps(optimizer),
        "load_state_dict": lambda: optimizer.load_state_dict(state),
        "step": optimizer.step,
        "compressed": lambda: optimizer.compressed().__enter__(),
    }
    closure()
    before, g = parameters(model), model[0].weight.grad.clone()
    with pytest.raises(RuntimeError, match="leave compressed"), optimizer.compressed():
        calls[name]()
    assert same(parameters(model), before)
    assert torch.equal(model[0].weight.grad, g)
    with pytest.raises(RuntimeError, match="put back to w inside"):
        block_with(calls[name], model, optimizer, closure)
    optimizer.step(closure)


def test_a_state_saved_inside_a_block_ends_it():
    model, optimizer, closure = build()
    closure()
    with pytest.raises(RuntimeError, match="put back to w inside"):
        block_with(optimizer.state_dict, model, optimizer, closure)


def test_a_fault_while_gradients_are_combined_leaves_g():
    model, optimizer, closure = build(C_SAM)
    closure()
    g = model[0].weight.grad.clone()
    optimizer._combine = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError), optimizer.compressed():
        closure()
    del optimizer._combine
    assert torch.equal(model[0].weight.grad, g)
    with pytest.raises(RuntimeError, match="no compressed pass went before"):
        optimizer.step()  # neither of the two passes counts
    optimizer.step(closure)


def test_restoring_with_nothing_to_restore():
    model, optimizer, closure = build()
    closure()
    before, g = snapshot(model), model[0].weight.grad
    optimizer.restore()
    assert same(snapshot(model), before)
    assert model[0].weight.grad is g


def test_unwinding_goes_on_where_it_was_interrupted():
    stack, done, fail = UndoStack(), [], [True]

    def second():
        if fail.pop():
            fail.append(False)
            raise FaultError
        done.append(2)

    stack.push(lambda: done.append(1))
    stack.push(second)
    stack.push(lambda: done.append(3))
    assert not stack.unwinding
    with pytest.raises(FaultError):
        stack.unwind()
    assert stack.unwinding
    assert done == [3]
    stack.unwind()
    assert done == [3, 2, 1]
    stack.unwind()
    assert done == [3, 2, 1]


def test_a_loop_that_was_not_adapted_is_refused():
    model, optimizer, closure = build()
    closure()
    before = parameters(model)
    with pytest.raises(RuntimeError, match=r"closure.*compressed\(\).*CompressedPass.*CrAMTrainer"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model(torch.randn(5, 8)), torch.randint(4, (5,)))).backward()
    with pytest.raises(RuntimeError, match="no compressed pass went before"):
        scaler.step(optimizer)
    assert same(parameters(model), before)


def test_a_pass_is_good_for_one_step():
    _, optimizer, closure = build()
    closure()
    with optimizer.compressed():
        closure()
    optimizer.step()
    with pytest.raises(RuntimeError, match="no compressed pass went before"):
        optimizer.step()
    closure()
    with optimizer.compressed():
        closure()
    closure()  # a batch without a compressed pass
    with pytest.raises(RuntimeError, match="no compressed pass went before"):
        optimizer.step()


def test_steps_that_move_nothing_are_not_refused():
    model, optimizer, closure = build()
    optimizer.step()  # no gradient at all, as after a batch that a loop leaves out
    closure()
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # how torch.distributed.checkpoint sets up the state
    before = parameters(model)
    optimizer.step()
    assert same(parameters(model), before)
