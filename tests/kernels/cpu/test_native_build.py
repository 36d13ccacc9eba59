"""Building the kernels: with a compiler, without one, and as part of a wheel."""

import ctypes
import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from native_library import needs_kernels

from torchcram.kernels.cpu import library
from torchcram.runtime import build as build_module

ROOT = Path(__file__).parents[3]


@needs_kernels
def test_the_library_goes_where_it_is_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "_COMMON", [*build_module._COMMON, "-O0"])  # quick
    target = build_module.build(tmp_path / "kernels.so")
    assert ctypes.CDLL(str(target)).torchcram_use_level(0) == 1
    assert list(tmp_path.iterdir()) == [target]


def compiler_for(machine, folder, *, refuses="nothing"):
    """A compiler that says which machine it is for, refuses a flag and writes nothing."""
    tool = folder / "compiler"
    tool.write_text(
        f'#!/bin/sh\ncase "$*" in *-dumpmachine*) echo {machine};; *{refuses}*) exit 1;; esac\n'
    )
    tool.chmod(0o755)
    return str(tool)


X86 = ["avx512", "avx2", "portable"]
ARM = ["neon_dotprod", "neon", "portable"]


@pytest.mark.parametrize(
    ("machine", "refuses", "levels", "left_out"),
    [
        ("x86_64-linux-gnu", "nothing", X86, []),
        ("aarch64-linux-gnu", "nothing", ARM, []),
        ("arm64-apple-darwin23.6.0", "nothing", ARM, []),
        ("aarch64-linux-gnu", "+dotprod", ARM[1:], ["-DTORCHCRAM_NO_NEON_DOTPROD"]),
        ("x86_64-linux-gnu", "-mavx512f", X86[1:], ["-DTORCHCRAM_NO_AVX512"]),
        ("riscv64-linux-gnu", "nothing", ["portable"], []),
    ],
)
def test_the_compiler_decides_which_instruction_sets_there_are(
    tmp_path, monkeypatch, machine, refuses, levels, left_out
):
    commands = []
    monkeypatch.setenv("CXX", compiler_for(machine, tmp_path, refuses=refuses))
    monkeypatch.setattr(build_module, "_run", commands.append)
    monkeypatch.setattr(build_module.shutil, "copyfile", lambda _, part: part.touch())
    build_module.build(tmp_path / "kernels.so")
    objects = [Path(command[-1]).stem for command in commands[:-1]]
    assert objects == [*build_module._UNITS, *levels]
    (interface,) = [command for command in commands if command[-1].endswith("api.o")]
    assert [word for word in interface if "_NO_" in word] == left_out


@pytest.mark.parametrize(
    ("python", "machine", "tag"),
    [
        ("linux-x86_64", "x86_64-linux-gnu", "linux_x86_64"),
        ("linux-aarch64", "aarch64-unknown-linux-gnu", "linux_aarch64"),
        ("linux-x86_64", "aarch64-linux-gnu", "linux_aarch64"),
        ("linux-riscv64", "riscv64-linux-gnu", "linux_riscv64"),
        ("macosx-11.0-arm64", "arm64-apple-darwin23.6.0", "macosx_11_0_arm64"),
        ("macosx-10.13-universal2", "arm64-apple-darwin23.6.0", "macosx_11_0_arm64"),
        ("macosx-10.13-universal2", "x86_64-apple-darwin23.6.0", "macosx_10_13_x86_64"),
    ],
)
def test_a_wheel_is_for_the_machine_of_the_compiler(tmp_path, monkeypatch, python, machine, tag):
    monkeypatch.setenv("CXX", compiler_for(machine, tmp_path))
    monkeypatch.setattr(build_module.sysconfig, "get_platform", lambda: python)
    assert build_module.wheel_platform() == tag


def test_the_kernels_can_be_compiled_for_arm(tmp_path, monkeypatch):
    if not shutil.which("aarch64-linux-gnu-g++"):
        pytest.skip("no cross compiler for ARM")
    monkeypatch.setenv("CXX", "aarch64-linux-gnu-g++ -Werror")
    monkeypatch.setattr(build_module, "_COMMON", [*build_module._COMMON, "-O0"])  # quick
    header = build_module.build(tmp_path / "kernels.so").read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX is of x86")
def test_an_old_compiler_leaves_out_what_it_does_not_know(tmp_path, monkeypatch):
    old = tmp_path / "old"
    real = " ".join(build_module.compiler())
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mavx512*) exit 1;; esac\nexec {real} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(build_module, "_COMMON", [*build_module._COMMON, "-O0"])
    library = ctypes.CDLL(str(build_module.build(tmp_path / "kernels.so")))
    library.torchcram_level.restype = ctypes.c_char_p
    assert library.torchcram_level() in (b"avx2", b"portable")
    assert library.torchcram_use_level(2) == 0
    assert library.torchcram_use_level(0) == 1
    assert library.torchcram_level() == b"portable"


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_module.compiler() is None
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        build_module.build(tmp_path / "kernels.so")


def build_command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "torchcram.runtime.build", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_command_says_in_one_line_that_there_is_no_compiler(tmp_path):
    ran = build_command(str(tmp_path / "kernels.so"), CXX="no-such-compiler")
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr == (
        "the kernels were not built: no C++ compiler: install g++ or clang++, or name one in CXX\n"
    )


def test_the_command_says_in_one_line_that_it_cannot_write(tmp_path, monkeypatch, capsys):
    def build(target, **_):
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(build_module, "build", build)
    assert build_module.main([str(tmp_path / "kernels.so")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the kernels were not built: ")
    assert "kernels.so" in line


def test_the_command_names_what_it_built(monkeypatch, capsys, tmp_path):
    given = []
    monkeypatch.setattr(
        build_module, "build", lambda target, **options: given.append(options) or target
    )
    assert build_module.main([]) == 0
    assert build_module.main(["--sanitize", str(tmp_path / "other.so")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [str(build_module.LIBRARY), str(tmp_path / "other.so")]
    assert given == [{"sanitize": False, "faults": False}, {"sanitize": True, "faults": True}]


def test_a_compiler_may_have_arguments(monkeypatch, tmp_path):
    tool = tmp_path / "my tool"
    tool.touch(mode=0o755)
    monkeypatch.setenv("CXX", f"'{tool}' -m64 -DX=1")
    assert build_module.compiler() == [str(tool), "-m64", "-DX=1"]
    monkeypatch.setenv("CXX", " ")
    assert build_module.compiler() is None


@needs_kernels
def test_an_error_of_the_compiler_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "_COMMON", ["-no-such-option"])
    with pytest.raises(RuntimeError, match="no-such-option"):
        build_module.build(tmp_path / "kernels.so")


@pytest.fixture
def hook():
    pytest.importorskip("hatchling")
    made = runpy.run_path(str(ROOT / "hatch_build.py"))["KernelsBuildHook"]
    warnings = []
    app = SimpleNamespace(display_warning=warnings.append)
    one = made(str(ROOT), {}, None, None, "", "wheel", app)
    one.warnings = warnings
    return one


@needs_kernels
def test_a_wheel_with_kernels_is_for_one_platform(hook, monkeypatch):
    library = build_module.LIBRARY
    tools = {"build": lambda: library, "wheel_platform": lambda: "linux_aarch64"}
    monkeypatch.setattr(runpy, "run_path", lambda _: tools)
    data = {"artifacts": []}
    hook.initialize("standard", data)
    assert data["artifacts"] == ["/src/torchcram/kernels/cpu/libtorchcram.so"]
    assert data["tag"] == "py3-none-linux_aarch64"
    assert data["pure_python"] is False


def test_without_a_compiler_the_wheel_is_for_every_machine(hook, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    data = {"artifacts": []}
    hook.initialize("standard", data)
    assert data == {"artifacts": []}
    assert "no kernels" in hook.warnings[0]
    monkeypatch.setenv("TORCHCRAM_KERNELS", "require")
    with pytest.raises(RuntimeError, match="no C"):
        hook.initialize("standard", data)


def test_a_folder_that_is_read_only_gives_a_wheel_for_every_machine(hook, monkeypatch):
    def build():
        raise PermissionError("libtorchcram.123")

    monkeypatch.setattr(runpy, "run_path", lambda _: {"build": build})
    data = {"artifacts": []}
    hook.initialize("standard", data)
    assert data == {"artifacts": []}
    assert "libtorchcram.123" in hook.warnings[0]


def test_a_library_that_cannot_be_loaded_says_why(monkeypatch, tmp_path):
    (tmp_path / "cut.so").write_bytes(b"\x7fELF")
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "cut.so")
    library.find.cache_clear()
    library.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="file too short"):
            assert not library.available()
    finally:
        library.find.cache_clear()
        library.library.cache_clear()


def test_the_environment_names_another_library(tmp_path):
    code = (
        "from torchcram.kernels.cpu import library; print(library.LIBRARY); print(library.find())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "TORCHCRAM_LIBRARY": str(tmp_path / "other.so")},
    )
    assert ran.stdout.splitlines() == [str(tmp_path / "other.so"), "None"]


@needs_kernels
def test_a_library_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(library, "_INTERFACE", -1)
    monkeypatch.setattr(library._state, "why", "")
    assert library.find.__wrapped__() is None
    assert "was built from another version of the sources" in library._state.why


@needs_kernels
def test_a_library_for_tests_finds_errors_of_memory(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(build_module, "_run", commands.append)
    monkeypatch.setattr(build_module.shutil, "copyfile", lambda _, part: part.touch())
    build_module.build(tmp_path / "new" / "kernels.so", sanitize=True, faults=True)
    assert (tmp_path / "new" / "kernels.so").exists()
    assert all("-fsanitize=address,undefined" in command for command in commands)
    assert any("faults.cpp" in word for command in commands for word in command)
    assert "-static-libstdc++" not in commands[-1]  # the sanitizer replaces parts of it
    commands.clear()
    build_module.build(tmp_path / "kernels.so")
    words = [word for command in commands for word in command]
    assert not any("sanitize" in word or "faults" in word.lower() for word in words)
