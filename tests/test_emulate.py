"""`make emulate`: what it says where it cannot run, what it installs and what it leaves out."""

import emulate
from packaging.requirements import Requirement


def test_it_names_the_packages_that_are_missing(monkeypatch, capsys):
    monkeypatch.setattr(emulate.shutil, "which", lambda _: None)
    monkeypatch.setattr(emulate.sys, "argv", ["emulate.py"])
    assert emulate.main() == 2
    assert "install qemu-user g++-aarch64-linux-gnu apt dpkg\n" in capsys.readouterr().err


def test_packages_come_with_what_they_depend_on():
    pinned = [Requirement(text) for text in emulate.installed_versions({"pytest", "hypothesis"})]
    names = {each.name for each in pinned}
    assert {"pytest", "pluggy", "iniconfig", "packaging", "hypothesis"} <= names
    assert not any(name.startswith(("nvidia", "triton", "colorama")) for name in names)
    assert all(str(each.specifier).startswith("==") for each in pinned)


def test_what_is_left_out_exists():
    for path in (*emulate.TESTS, *emulate.LEFT_OUT):
        file, _, name = path.partition("::")
        assert (emulate.PROJECT / file).exists()
        assert not name or f"def {name}(" in (emulate.PROJECT / file).read_text()
