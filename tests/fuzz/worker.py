"""The child process: makes inputs from a seed and reads them, one line of result for each."""

import importlib
import json
import os
import random
import sys
import traceback
from functools import partial
from pathlib import Path

MEMORY = 16 << 30  # of addresses: what a small input asks for is small


def make(kind, seed, index):
    """Returns the input of a number; the same for the same seed."""
    rng = random.Random(f"{seed} {kind} {index}")  # noqa: S311
    return module_of(kind).make(rng)


def module_of(kind):
    """Returns a module with `make(rng) -> bytes`, and `read(content, folder)`: is it accepted?"""
    return importlib.import_module(f"fuzz.{kind.replace('-', '_')}")


def serve(folder):
    """Answers requests, lines of JSON, until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    limit_memory()
    for line in sys.stdin:
        request = json.loads(line)
        kind = request["kind"]
        module_of(kind)
        print(json.dumps({"ready": True}), file=answers)
        if "replay" in request:
            answer(answers, kind, Path(request["replay"]).read_bytes, folder / "input0")
            continue
        for index in range(request["first"], request["first"] + request["count"]):
            made = partial(make, kind, request["seed"], index)
            answer(answers, kind, made, folder / f"input{index}")


def answer(answers, kind, made, path):
    """Reads one input, which is on the disk before, and stays there if it fails."""
    outcome, said = "failed", ""
    path.write_bytes(b"")
    try:
        content = made()
        path.write_bytes(content)
        outcome = "accepted" if module_of(kind).read(content, path.parent) else "refused"
        path.unlink()
    except BaseException:  # noqa: BLE001  whatever it is, it is the result
        said = traceback.format_exc()
    print(json.dumps({"outcome": outcome, "said": said}), file=answers)


def limit_memory():
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
