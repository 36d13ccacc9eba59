"""The command line of the fuzzer; see the package for what it does."""

import argparse
import secrets
import sys
from pathlib import Path

from fuzz.runner import KINDS, in_turns, replay, run


def main():
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--seed", type=int, help="seed of the inputs; a new one by default")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what to read")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--replay", type=Path, help="a saved input to read again")
    given = parser.parse_args()
    say = sys.stdout.write
    if given.replay is not None:
        outcome, said = replay(given.replay)
        say(f"{outcome}\n{said}")
        return int(outcome == "failed")
    seed = secrets.randbelow(1 << 31) if given.seed is None else given.seed
    say(f"seed {seed}, for {given.seconds:g} seconds\n")

    def tell(failure):
        say(f"\n{failure.path}\n{failure.said}\n")
        sys.stdout.flush()

    batches = in_turns(given.kinds, given.seconds)
    outcome = run(batches, seed, given.failures, told=tell)
    for kind in given.kinds:
        accepted, refused = outcome.accepted.get(kind, 0), outcome.refused.get(kind, 0)
        failed = sum(failure.kind == kind for failure in outcome.failures)
        say(f"{kind:16} {accepted:7} accepted {refused:7} refused {failed:5} failed\n")
    return int(bool(outcome.failures))


if __name__ == "__main__":
    sys.exit(main())
