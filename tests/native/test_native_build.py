"""Building the kernels: with a compiler, without one, and as part of a wheel."""

import ctypes
import platform
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from native_library import needs_kernels

from torchcram.native import compiling

ROOT = Path(__file__).parents[2]


@needs_kernels
def test_the_library_goes_where_it_is_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_COMMON", [*compiling._COMMON, "-O0"])  # quick
    target = compiling.build(tmp_path / "kernels.so")
    assert ctypes.CDLL(str(target)).torchcram_use_level(0) == 1
    assert list(tmp_path.iterdir()) == [target]


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX is of x86")
def test_an_old_compiler_leaves_out_what_it_does_not_know(tmp_path, monkeypatch):
    old = tmp_path / "old"
    real = " ".join(compiling.compiler())
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mavx512*) exit 1;; esac\nexec {real} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(compiling, "_COMMON", [*compiling._COMMON, "-O0"])
    library = ctypes.CDLL(str(compiling.build(tmp_path / "kernels.so")))
    library.torchcram_level.restype = ctypes.c_char_p
    assert library.torchcram_level() in (b"avx2", b"portable")
    assert library.torchcram_use_level(2) == 0
    assert library.torchcram_use_level(0) == 1
    assert library.torchcram_level() == b"portable"


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiling.compiler() is None
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        compiling.build(tmp_path / "kernels.so")


def test_a_compiler_may_have_arguments(monkeypatch, tmp_path):
    tool = tmp_path / "my tool"
    tool.touch(mode=0o755)
    monkeypatch.setenv("CXX", f"'{tool}' -m64 -DX=1")
    assert compiling.compiler() == [str(tool), "-m64", "-DX=1"]
    monkeypatch.setenv("CXX", " ")
    assert compiling.compiler() is None


@needs_kernels
def test_an_error_of_the_compiler_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_COMMON", ["-no-such-option"])
    with pytest.raises(RuntimeError, match="no-such-option"):
        compiling.build(tmp_path / "kernels.so")


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
    library = compiling.LIBRARY
    monkeypatch.setattr(runpy, "run_path", lambda _: {"build": lambda: library})
    data = {"artifacts": []}
    hook.initialize("standard", data)
    assert data["artifacts"] == ["/src/torchcram/native/libtorchcram.so"]
    assert data["tag"].startswith("py3-none-")
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
    from torchcram.native import library

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
