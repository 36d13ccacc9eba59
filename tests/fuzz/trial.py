"""Inputs that fail in every way there is, to see that failures are seen."""

import ctypes
import time

WAYS = (b"accept", b"refuse", b"raise", b"crash", b"hang", b"memory")


def make(rng):
    return rng.choice(WAYS)


def read(content, folder):
    del folder
    if content == b"raise":
        raise KeyError("not a ValueError")
    if content == b"crash":
        ctypes.string_at(0)
    if content == b"hang":
        time.sleep(600)
    if content == b"memory":
        bytearray(1 << 40)
    return content == b"accept"
