"""A short run of the fuzzer with fixed inputs, and that it sees what it is to see."""

import pytest

from fuzz import worker
from fuzz.runner import KINDS, replay, run

CASES = {
    "artefact-files": 200,
    "packed-matrices": 500,
    "recipe-texts": 250,
    "operator-texts": 1500,
}
"""Number of inputs: about ten seconds."""


def test_every_input_is_read_or_refused(tmp_path):
    outcome = run([(kind, range(CASES[kind])) for kind in KINDS], 0, tmp_path)
    assert not outcome.failures, "\n".join(f"{f.path.name}: {f.said}" for f in outcome.failures)
    for kind in KINDS:
        accepted, refused = outcome.accepted[kind], outcome.refused[kind]
        assert accepted + refused == CASES[kind]
        assert min(accepted, refused) > CASES[kind] / 20  # neither is all that happens


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_depend_on_the_seed_alone(kind):
    inputs = [worker.make(kind, 3, index) for index in range(20)]
    assert inputs == [worker.make(kind, 3, index) for index in range(20)]
    assert inputs != [worker.make(kind, 4, index) for index in range(20)]


def test_failures_of_all_kinds_are_seen_and_saved(tmp_path):
    outcome = run([("trial", range(12))], 0, tmp_path, hang=1.0)
    expected = {
        index: content
        for index in range(12)
        if (content := worker.make("trial", 0, index)) not in (b"accept", b"refuse")
    }
    assert set(expected.values()) == {b"raise", b"crash", b"hang", b"memory"}
    assert {failure.index: failure.path.read_bytes() for failure in outcome.failures} == expected
    said = {
        b"raise": "KeyError: 'not a ValueError'",
        b"crash": "the process ended, with signal 11",
        b"hang": "no answer for 1 seconds",
        b"memory": "MemoryError",
    }
    for failure in outcome.failures:
        assert said[expected[failure.index]] in failure.said
        assert failure.path.with_suffix(".txt").read_text() == failure.said
    assert outcome.accepted["trial"] + outcome.refused["trial"] == 12 - len(expected)
    (raised, *_) = (one for one in outcome.failures if expected[one.index] == b"raise")
    assert replay(raised.path)[0] == "failed"
    assert "KeyError" in replay(raised.path)[1]
