"""Properties of sparsity schedules, and of times in recipes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchcram import GlobalTopK
from torchcram.baselines import SparsitySchedule
from torchcram.baselines.schedule import at_sparsity
from torchcram.experiments.recipe.methods import read_time

levels = st.floats(0, 1, exclude_max=True)


@st.composite
def schedules(draw, final=1.0):
    begin = draw(st.integers(0, 30))
    return SparsitySchedule(
        begin=begin,
        end=begin + draw(st.integers(0, 60)),
        interval=draw(st.integers(1, 40)),
        initial=draw(st.floats(0, final, exclude_max=final == 1)),
    )


@st.composite
def schedules_and_targets(draw):
    final = draw(levels)
    return draw(schedules(final)), final


@given(schedules_and_targets())
def test_the_sparsity_never_falls_and_ends_exactly_at_the_target(case):
    schedule, final = case
    values = [schedule.sparsity(step, final) for step in range(schedule.end + 3)]
    slack = 1e-12  # of floating-point numbers
    for before, after in pairwise(values):
        assert after >= before - slack
    assert all(0 <= value <= final + slack for value in values)
    assert values[: schedule.begin] == [0.0] * schedule.begin
    assert values[schedule.end :] == [final] * 3
    if schedule.begin < schedule.end:
        assert values[schedule.begin] == pytest.approx(schedule.initial, abs=slack)


@given(schedules(), levels)
def test_every_sparsity_of_a_schedule_is_one_of_an_operator(schedule, final):
    schedule = SparsitySchedule(end=schedule.end, begin=schedule.begin)
    for step in range(schedule.end + 2):
        operator = at_sparsity(GlobalTopK(final), schedule.sparsity(step, final))
        assert 0 <= operator.sparsity <= final


@given(schedules())
def test_the_next_selection_is_the_first_that_is_due(schedule):
    due = [step for step in range(schedule.end + 100) if schedule.is_due(step)]
    assert due[0] == schedule.begin
    assert due[-1] == schedule.end
    for step in range(schedule.end + 3):
        assert schedule.next_due(step) == next((later for later in due if later > step), None)
    gaps = [later - step for step, later in pairwise(due)]
    assert all(gap == schedule.interval for gap in gaps[:-1])
    assert all(gap <= schedule.interval for gap in gaps)


@given(schedules())
def test_selections_go_on_after_the_end_where_they_should(schedule):
    steps = range(schedule.end + 3 * schedule.interval + 1)
    due = [step for step in steps if schedule.is_due(step, after_end=True)]
    assert [step for step in due if step <= schedule.end] == [
        step for step in steps if schedule.is_due(step)
    ]
    later = [step for step in due if step > schedule.end]
    assert later == [schedule.end + times * schedule.interval for times in (1, 2, 3)]


no_digits = st.text(st.characters(exclude_categories=["Nd", "Cs"]))
lengths = {"epochs": st.integers(1, 300), "steps_per_epoch": st.integers(1, 5000)}


@given(steps=st.integers(0, 10**9), **lengths)
def test_a_number_of_steps_is_itself(steps, epochs, steps_per_epoch):
    assert read_time("end", steps, epochs=epochs, steps_per_epoch=steps_per_epoch) == steps


@given(number=st.integers(0, 400), blank=st.booleans(), **lengths)
def test_epochs_and_parts_are_exact(number, blank, epochs, steps_per_epoch):
    length = {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
    gap = " " * blank
    unit = "epoch" if number == 1 else "epochs"
    assert read_time("end", f"{number}{gap}{unit}", **length) == number * steps_per_epoch
    part = read_time("end", f"{number}{gap}%", **length)
    assert abs(part - number * epochs * steps_per_epoch / 100) <= 0.5 + 1e-6
    assert read_time("end", f"100{gap}%", **length) == epochs * steps_per_epoch
    assert part <= read_time("end", f"{number + 1} %", **length)


@given(no_digits | st.floats() | st.booleans() | st.none() | st.integers(max_value=-1))
def test_anything_else_is_refused_with_what_is_allowed(value):
    with pytest.raises(ValueError, match="allowed: a number of steps, of epochs as in `30 epochs`"):
        read_time("end", value, epochs=3, steps_per_epoch=7)
