"""Tests of the CPU kernels on an emulated ARM processor: `make emulate`.

The kernels are compiled by a cross compiler, and an ARM Python runs the tests in QEMU, once on a
processor with dot products and once without. Python comes from the Debian packages of ARM, torch
and the other packages from their wheels for ARM; all of it stays in build/emulate and needs no
root. What is there already is used again. An emulator tells whether the kernels are right, and
nothing about their speed.

    python tests/emulate.py                        the tests in TESTS, with both processors
    python tests/emulate.py --cpu max -- -k int8   arguments of pytest after two dashes
"""

from __future__ import annotations

import argparse
import getpass
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]
FOLDER = PROJECT / "build" / "emulate"
ROOT, SITE, LIBRARY = FOLDER / "root", FOLDER / "site", FOLDER / "libtorchcram.so"

COMPILER = "aarch64-linux-gnu-g++"
TOOLS = {
    "qemu-aarch64": "qemu-user",
    COMPILER: "g++-aarch64-linux-gnu",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
CPUS = ("max", "cortex-a72")  # with dot products and without
TESTS = ("tests/kernels/cpu", "tests/runtime/cpu", "tests/runtime/test_integers.py")
# Other processes of Python would need an emulator of their own, and the child of a process with
# threads does not answer in time. ONNX is not installed there.
LEFT_OUT = (
    "tests/kernels/cpu/test_native_build.py",
    "tests/runtime/cpu/test_runtime_threads.py::test_a_child_may_be_the_first_to_load_them",
    "tests/runtime/cpu/test_runtime_threads.py::test_after_a_fork",
    "tests/runtime/cpu/test_runtime_batches.py::test_a_forked_process_has_threads_of_its_own",
    "tests/runtime/cpu/test_runtime_sequences.py::test_onnx_files_hold_the_integers_of_all_layers",
)

TORCH = "torch==2.8.0"  # of the versions that are supported, one whose wheel for ARM is small
NEEDED_BY_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
NEEDED_BY_TESTS = ("hypothesis", "numpy", "pytest", "pyyaml", "safetensors", "transformers")
IGNORED_WARNING = "ignore:record_context_cpp is not support"  # by torch, on anything but x86
GLIBC = ("2_28", "2_27", "2_26", "2_17")


def missing_tools() -> list[str]:
    """Returns the Debian packages of the tools that this machine lacks."""
    return [package for tool, package in TOOLS.items() if not shutil.which(tool)]


def run(*command: str | Path, **environment: str) -> None:
    subprocess.run([*map(str, command)], check=True, env={**os.environ, **environment})


def install_python() -> None:
    """Unpacks the Python of Debian for ARM, with what it depends on, into ROOT."""
    if ROOT.exists():
        return
    state, part = FOLDER / "apt", FOLDER / "root.part"
    for folder in (state / "lists" / "partial", state / "archives" / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()  # no package is installed yet
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": getpass.getuser(),
        "Debug::NoLocking": "true",
        "Dir::State": str(state),
        "Dir::State::status": str(state / "status"),
        "Dir::Cache": str(state),
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    run(*apt, "update")
    run(*apt, "--yes", "--download-only", "install", "python3", "libstdc++6")
    for package in sorted((state / "archives").glob("*.deb")):
        run("dpkg-deb", "--extract", package, part)
    part.rename(ROOT)


def interpreter() -> Path:
    return (ROOT / "usr" / "bin" / "python3").resolve()


def installed_versions(names: set[str]) -> list[str]:
    """Returns packages and all that they depend on, with the versions of this environment."""
    found, left = {}, set(names)
    while left:
        package = metadata.distribution(left.pop())
        found[canonicalize_name(package.name)] = package.version
        for needed in map(Requirement, package.requires or []):
            here = {"platform_machine": "aarch64", "extra": ""}
            if needed.marker is None or needed.marker.evaluate(here):
                left.add(canonicalize_name(needed.name))
        left -= found.keys()
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def install_packages() -> None:
    """Installs the wheels of torch and other packages for ARM into SITE."""
    if SITE.exists():
        return
    part = FOLDER / "site.part"
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary", ":all:", "--target", part),
        *("--python-version", interpreter().name.removeprefix("python")),
        *(word for glibc in GLIBC for word in ("--platform", f"manylinux_{glibc}_aarch64")),
        *("--platform", "manylinux2014_aarch64"),
        *(TORCH, *installed_versions({*NEEDED_BY_TORCH, *NEEDED_BY_TESTS})),
    )
    part.rename(SITE)


def test(cpu: str, arguments: list[str]) -> int:
    """Runs pytest on an emulated processor and returns its exit code."""
    environment = {
        "CXX": COMPILER,  # for tests that compile another library
        "PYTHONHOME": str(ROOT / "usr"),
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, PROJECT / "src", PROJECT / "tests"))),
        "TORCHCRAM_LIBRARY": str(LIBRARY),
    }
    command = ["qemu-aarch64", "-cpu", cpu, "-L", str(ROOT), str(interpreter()), "-m", "pytest"]
    options = [f"--deselect={path}" for path in LEFT_OUT]
    options.append(f"-W{IGNORED_WARNING}")
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", *options, *(arguments or TESTS)],
        check=False,
        cwd=PROJECT,
        env={**os.environ, **environment},
    )
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests the CPU kernels on an emulated ARM.")
    parser.add_argument("--cpu", action="append", help=f"processor of QEMU; by default {CPUS}")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after two dashes")
    options = parser.parse_args()
    if missing := missing_tools():
        sys.stderr.write(
            f"the kernels cannot be tested for ARM here; on Debian, install {' '.join(missing)}\n"
        )
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    install_python()
    install_packages()
    build = [sys.executable, PROJECT / "src/torchcram/runtime/build.py", LIBRARY]
    run(*build, CXX=COMPILER)
    return max(test(cpu, options.pytest) for cpu in options.cpu or CPUS)


if __name__ == "__main__":
    raise SystemExit(main())
