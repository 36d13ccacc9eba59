"""The parent process: hands out numbers of inputs, and notes what becomes of them."""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("artefact-files", "packed-matrices", "recipe-texts", "operator-texts")
BATCH = 25  # inputs of a kind before the next one has its turn
START = 300.0  # seconds that a child process has to start and to import what it needs
HANG = 30.0  # seconds that one input has: a hundred times what they take, machines being busy


@dataclass(frozen=True)
class Failure:
    """An input that was neither read nor refused.

    Attributes:
        kind: Kind of the input.
        seed: Seed of the run.
        index: Number of the input.
        said: Traceback, or how the process ended.
        path: Path that the input is saved at.
    """

    kind: str
    seed: int
    index: int
    said: str
    path: Path


@dataclass
class Outcome:
    """What became of all inputs.

    Attributes:
        accepted: Number of inputs that were read, by kind.
        refused: Number of inputs that were refused, by kind.
        failures: Inputs that failed.
    """

    accepted: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


class Child:
    """A process that reads inputs; it is started anew where it ends."""

    def __init__(self, folder, *, hang=HANG):
        self.folder, self.hang = folder, hang
        self.process = None
        self.ended = ""

    def send(self, request):
        if self.process is None:
            self._start()
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if self._line(START) is None:
            raise RuntimeError(f"python -m fuzz.worker does not start: {self.ended}")

    def _start(self):
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)  # noqa: PTH100
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.worker", str(self.folder)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._listen, args=(self.process, self._lines), daemon=True).start()

    @staticmethod
    def _listen(process, lines):
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def answer(self):
        """Returns the next answer; None where the process died or hung, which `ended` tells."""
        return self._line(self.hang)

    def _line(self, seconds):
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            self.ended = f"no answer for {seconds:g} seconds"
            return None
        if line is None:
            code = self.process.wait()
            self.stop()
            self.ended = f"the process ended, with {f'signal {-code}' if code < 0 else code}"
            return None
        return json.loads(line)

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


@contextmanager
def child_process(*, hang=HANG):
    with tempfile.TemporaryDirectory() as folder:
        child = Child(Path(folder), hang=hang)
        try:
            yield child
        finally:
            child.stop()


def run(batches, seed, failures, *, hang=HANG, told=None):
    """Reads inputs and returns what became of them.

    Args:
        batches: Pairs of a kind and the numbers of its inputs, a range.
        seed: Seed that the inputs are made from.
        failures: Folder for inputs that fail.
        hang: Seconds that one input may take.
        told: Called with every failure.
    """
    outcome = Outcome()
    with child_process(hang=hang) as child:
        for kind, numbers in batches:
            done = numbers.start
            while done < numbers.stop:
                request = {"kind": kind, "seed": seed, "first": done, "count": numbers.stop - done}
                child.send(request)
                while done < numbers.stop:
                    answer = child.answer()
                    said = child.ended if answer is None else answer["said"]
                    result = "failed" if answer is None else answer["outcome"]
                    if result == "failed":
                        failure = _saved(child.folder, failures, kind, seed, done, said)
                        outcome.failures.append(failure)
                        if told is not None:
                            told(failure)
                    else:
                        counts = getattr(outcome, result)
                        counts[kind] = counts.get(kind, 0) + 1
                    done += 1
                    if answer is None:
                        break  # the rest goes to another process
    return outcome


def in_turns(kinds, seconds):
    """Yields batches of all kinds in turns, until the time is over."""
    end = time.monotonic() + seconds
    first = 0
    while True:
        for kind in kinds:
            if time.monotonic() >= end:
                return
            yield kind, range(first, first + BATCH)
        first += BATCH


def replay(path):
    """Reads a saved input again; returns what became of it, and what was said."""
    kind = path.name.split(".")[0]
    with child_process() as child:
        child.send({"kind": kind, "replay": str(path.resolve())})
        answer = child.answer()
        return ("failed", child.ended) if answer is None else (answer["outcome"], answer["said"])


def _saved(folder, failures, kind, seed, index, said):
    failures.mkdir(parents=True, exist_ok=True)
    path = failures / f"{kind}.seed{seed}.{index}.input"
    shutil.move(folder / f"input{index}", path)
    path.with_suffix(".txt").write_text(said)
    return Failure(kind, seed, index, said, path)
