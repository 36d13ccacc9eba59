import signal
import sys
import threading
import time

import pytest

from torchcram.experiments.machine import cores
from torchcram.experiments.training.parallel import Job, run_jobs


def job(name, code):
    return Job(name, (sys.executable, "-S", "-c", code))


def test_every_line_is_heard_and_the_environment_reaches_all():
    code = "import os; print(os.environ['WORD']); print('and', os.environ['PATH'] != '')"
    heard = []
    jobs = [job(name, code) for name in "abc"]
    failures = run_jobs(
        jobs, lambda *news: heard.append(news), at_once=2, environment={"WORD": "hello"}
    )
    assert failures == []
    for one in jobs:
        assert [line for who, line in heard if who is one] == ["hello", "and True"]


def test_no_more_run_than_asked_for(tmp_path):
    code = (
        "import os, pathlib, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "mine = folder / str(os.getpid())\n"
        "mine.touch(); time.sleep(0.1); print(len(list(folder.iterdir()))); mine.unlink()"
    )
    seen = []
    run_jobs(
        [job(str(n), code) for n in range(5)], lambda _, line: seen.append(int(line)), at_once=2
    )
    assert len(seen) == 5
    assert max(seen) <= 2


def test_a_failure_has_its_last_lines_and_stops_nobody():
    talk = "import sys\nfor n in range(50): print('line', n, file=sys.stderr)\nsys.exit(7)"
    heard = []
    jobs = [job("bad", talk), job("worse", "raise ValueError('no')"), job("good", "print('yes')")]
    bad, worse = run_jobs(jobs, lambda *news: heard.append(news), at_once=3)
    assert (bad.job, bad.status) == (jobs[0], 7)
    assert bad.lines[-1] == "line 49"
    assert len(bad.lines) == 12
    assert (worse.job, worse.status) == (jobs[1], 1)
    assert worse.lines[-1] == "ValueError: no"
    assert heard == [(jobs[2], "yes")]


def test_bytes_that_are_no_text_do_no_harm():
    code = (
        "import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\n'); sys.stderr.buffer.write(b'\\xff')"
    )
    heard = []
    assert run_jobs([job("odd", code)], lambda _, line: heard.append(line), at_once=1) == []
    assert len(heard) == 1


WAIT = """
import signal, sys, time
def end(*_):
    open(sys.argv[1], "w").write("ended")
    sys.exit(0)
signal.signal(signal.SIGINT, end)
print("ready", flush=True)
for _ in range(600):  # a signal just before a sleep is heard only after it
    time.sleep(0.1)
"""


@pytest.fixture
def _heard_ctrl_c():
    """What runs the tests may have switched it off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard_ctrl_c")
@pytest.mark.skipif(sys.platform == "win32", reason="signals are other ones there")
@pytest.mark.parametrize("how", ["error", "SIGTERM", "SIGINT"])
def test_all_end_politely_when_this_does(tmp_path, how):
    jobs = [
        Job(name, (sys.executable, "-S", "-c", WAIT, str(tmp_path / name))) for name in ("a", "b")
    ]
    ready = []

    def heard(who, _line):
        ready.append(who)
        if len(ready) == 2:
            if how == "error":
                raise KeyboardInterrupt
            signal.raise_signal(getattr(signal, how))

    before = signal.getsignal(signal.SIGTERM)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, heard, at_once=2)
    assert time.monotonic() - begin < 30
    assert [(tmp_path / one.name).read_text() for one in jobs] == ["ended", "ended"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(sys.platform == "win32", reason="signals are other ones there")
def test_who_does_not_listen_is_killed(monkeypatch):
    monkeypatch.setattr("torchcram.experiments.training.parallel.PATIENCE", 0.1)
    deaf = (
        "import signal, time\n"
        "for name in ('SIGINT', 'SIGTERM'): signal.signal(getattr(signal, name), signal.SIG_IGN)\n"
        "print('ready', flush=True); time.sleep(60)"
    )

    def stop(*_):
        raise ZeroDivisionError

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        run_jobs([job("deaf", deaf)], stop, at_once=1)
    assert time.monotonic() - begin < 30


def test_it_works_outside_of_the_main_thread():
    heard = []
    jobs = [job("a", "print(1)")]
    thread = threading.Thread(
        target=lambda: run_jobs(jobs, lambda _, line: heard.append(line), at_once=1)
    )
    thread.start()
    thread.join(60)
    assert heard == ["1"]


def test_at_least_one_runs():
    with pytest.raises(ValueError, match="0 processes at once"):
        run_jobs([], lambda *_: None, at_once=0)
    assert cores() >= 1
