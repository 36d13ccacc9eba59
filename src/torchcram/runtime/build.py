"""Compiles the CPU kernels with the system's C++ compiler: `python -m torchcram.runtime.build`.

The library is written into the package. This file needs the standard library alone, so that the
build of the package can run it before torch is installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "kernels" / "cpu"
SOURCES = KERNELS / "csrc"
LIBRARY = KERNELS / "libtorchcram.so"

# compiled once, for every instruction set
_UNITS = ("api", "check", "checksum", "decode", "pack", "parallel")
_COMMON = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
_SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer"]
_SANITIZE += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
_AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mfma"]
# g++ would move so many loads to the front of a loop that they no longer fit the registers
_NEON = ["-DTORCHCRAM_NEON", "-fno-schedule-insns"]
_LEVELS = {
    "x86_64": {
        "avx512": ["-DTORCHCRAM_AVX512", *_AVX512, "-mprefer-vector-width=512"],
        "avx2": ["-DTORCHCRAM_AVX2", "-mavx2", "-mfma"],
    },
    "aarch64": {
        "neon_dotprod": [*_NEON, "-DTORCHCRAM_DOTPROD", "-march=armv8.2-a+dotprod"],
        "neon": _NEON,
    },
}
_RECENT = ("avx512", "neon_dotprod")  # left out if the compiler is too old
_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def compiler() -> list[str] | None:
    """Returns the command of the C++ compiler: CXX, with its arguments, or else g++ or clang++."""
    named = os.environ.get("CXX")
    for words in [shlex.split(named)] if named else [["g++"], ["clang++"]]:
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    return None


def architecture(command: list[str]) -> str:
    """Returns the architecture that a compiler compiles for: x86_64, aarch64 or another one.

    Args:
        command: Command of the compiler with its arguments.
    """
    ask = [*command, "-dumpmachine"]
    asked = subprocess.run(ask, capture_output=True, text=True, check=False)  # noqa: S603
    name = asked.stdout.partition("-")[0] if asked.returncode == 0 else platform.machine()
    return _NAMES.get(name.lower(), name.lower())


def wheel_platform() -> str:
    """Returns the platform tag of a wheel with the library that `build` compiles.

    It is that of Python, with the architecture of the compiler: a cross compiler is for another
    one, and a Python for macOS may be for two (universal2).
    """
    system, _, machine = sysconfig.get_platform().rpartition("-")
    command = compiler()
    if command is not None and (target := architecture(command)) in _LEVELS:
        machine = target
    if system.startswith("macosx") and machine == "aarch64":
        major = int(system.removeprefix("macosx-").partition(".")[0])
        system, machine = system if major >= 11 else "macosx-11.0", "arm64"
    return f"{system}-{machine}".replace("-", "_").replace(".", "_")


def build(target: Path = LIBRARY, *, sanitize: bool = False, faults: bool = False) -> Path:
    """Compiles the kernels into `target` and returns it.

    Args:
        target: Library to write.
        sanitize: Whether memory errors and undefined behaviour end the process with a report
            (AddressSanitizer and UBSan). LD_PRELOAD must name libasan, libubsan and libstdc++ then.
        faults: Whether tests can make an allocation fail by calling `torchcram_fail_allocation`.

    Raises:
        RuntimeError: If there is no compiler, or it fails.
    """
    command = compiler()
    if command is None or sys.platform == "win32":
        raise RuntimeError("no C++ compiler: install g++ or clang++, or name one in CXX")
    levels = {**_LEVELS.get(architecture(command), {}), "portable": []}
    without = []
    for level in _RECENT:
        if level in levels and not _accepts(command, levels[level]):
            del levels[level]
            without.append(f"-DTORCHCRAM_NO_{level.upper()}")
    names = (*_UNITS, "faults") if faults else _UNITS
    units = [(SOURCES / f"{name}.cpp", name, without) for name in names]
    units += [(SOURCES / "kernels.cpp", level, flags) for level, flags in levels.items()]
    extra = [*(_SANITIZE if sanitize else []), *(["-DTORCHCRAM_FAULTS"] if faults else [])]
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source, name, flags in units:
            objects.append(f"{folder}/{name}.o")
            _run([*command, *_COMMON, *flags, *extra, "-c", str(source), "-o", objects[-1]])
        library = f"{folder}/{target.name}"
        _run([*command, *_linking(sanitize=sanitize, faults=faults), *objects, "-o", library])
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        shutil.copyfile(library, part)
        part.replace(target)  # processes that have loaded the old library keep it
    return target


def _linking(*, sanitize: bool, faults: bool) -> list[str]:
    """Returns the arguments that link objects to a shared library."""
    words = ["-shared", "-pthread"]
    if sanitize:  # sanitizers replace functions of the C++ library, so it must be shared
        words += _SANITIZE
    elif sys.platform == "linux":
        words += ["-static-libstdc++", "-static-libgcc"]
    if faults:  # calls of `new` go to the definition in faults.cpp
        words += ["-Wl,-Bsymbolic"]
    return words


def _accepts(command: list[str], flags: list[str]) -> bool:
    """Returns whether a compiler accepts flags."""
    probe = [*command, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0  # noqa: S603


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


def main(arguments: list[str] | None = None) -> int:
    """Builds the kernels and returns the exit code.

    Args:
        arguments: Command-line arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchcram.runtime.build", description="Builds the sparse kernels."
    )
    parser.add_argument(
        "target",
        nargs="?",
        type=Path,
        default=LIBRARY,
        help="library to write; by default the one that the package loads",
    )
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="build with AddressSanitizer, UBSan and allocation failure on demand, for tests",
    )
    options = parser.parse_args(arguments)
    try:
        library = build(options.target, sanitize=options.sanitize, faults=options.sanitize)
    except (RuntimeError, OSError) as error:  # OSError: a read-only folder
        sys.stderr.write(f"the kernels were not built: {error}\n")
        return 1
    sys.stdout.write(f"{library}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
