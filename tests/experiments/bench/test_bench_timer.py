import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram.experiments.bench.record import Times
from torchcram.experiments.bench.timer import LEAST, SAMPLE, WARM_UP, measure, summary


class Clock:
    """Goes on only when work is done."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now

    def work(self, name, *seconds):
        """Takes so long, in turns; the last one for ever."""
        left = list(seconds)

        def call():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_the_median_is_in_milliseconds():
    clock = Clock()
    found = measure({"a": clock.work("a", 0.25), "b": clock.work("b", 0.5)}, rounds=3, clock=clock)
    assert found == {"a": Times(250, 250, 250, 3), "b": Times(500, 500, 500, 3)}


def test_everything_takes_turns_and_begins_once():
    clock = Clock()
    work = {name: clock.work(name, 1.0) for name in "abc"}
    measure(work, rounds=2, clock=clock)
    turns = clock.calls[::2]  # every turn is a call that does not count and one that does
    assert turns == clock.calls[1::2]
    assert ["".join(turns[i : i + 3]) for i in range(0, len(turns), 3)] == [
        "abc",
        "bca",
        "cab",
        "abc",
    ]
    assert len(turns) == 3 * (WARM_UP + 2)


def test_warm_up_and_first_calls_do_not_count():
    clock = Clock()
    slow = [9.0, 8.0] * WARM_UP
    found = measure({"a": clock.work("a", *slow, 7.0, 0.5, 6.0, 1.5)}, rounds=2, clock=clock)
    assert found["a"] == Times(1000, 750, 1250, 2)


def test_short_calls_are_repeated_until_they_can_be_timed():
    clock = Clock()
    found = measure({"a": clock.work("a", SAMPLE / 3.5)}, rounds=1, clock=clock)
    assert found["a"].median == pytest.approx(1000 * SAMPLE / 3.5)
    assert len(clock.calls) == (WARM_UP + 1) * (1 + 4)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, LEAST), (1e9, 20), (None, 20)])
def test_after_the_seconds_no_further_round_begins(seconds, rounds):
    clock = Clock()
    found = measure({"a": clock.work("a", 1.0)}, rounds=20, seconds=seconds, clock=clock)
    assert found["a"].rounds == rounds


def test_nothing_to_do_is_nothing():
    assert measure({}, rounds=3, clock=Clock()) == {}


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds=0"):
        measure({}, rounds=0)


def test_quartiles():
    assert summary([5.0, 1.0, 3.0, 2.0, 4.0]) == Times(3, 2, 4, 5)
    assert summary([7.0]) == Times(7, 7, 7, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40))
def test_quartiles_are_in_order_and_among_the_values(values):
    found = summary(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert found.rounds == len(values)
