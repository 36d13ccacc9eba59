"""Structured fuzzing of what the library reads: files, packed matrices, recipes, operator texts.

    make fuzz SECONDS=60            mutated inputs for a minute, of a new seed
    make fuzz SECONDS=60 SEED=7     the same ones again
    python -m fuzz --replay FILE    one saved input again (with tests/ on PYTHONPATH)

Every input is read correctly or refused with a ValueError. Anything else is a failure: another
exception, a process that dies or hangs, a model that is changed by what it refuses. Inputs are read
in a child process, so that a crash is seen; those that fail are saved.
"""
