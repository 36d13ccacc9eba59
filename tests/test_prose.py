"""The words of docstrings and the names of variables, as `tests/prose.py` checks them."""

from pathlib import Path

import pytest
from prose import SOURCE, offences, offences_under


def test_source_is_clean() -> None:
    listed = offences_under([SOURCE])
    assert not listed, "\n" + "\n".join(listed)


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("seed: of the run.", "begins with 'of'"),
        ("seed: Of the run.", "begins with 'Of'"),
        ("seed: likewise.", "begins with 'likewise'"),
        ("seed: If there is a run.", "begins with 'If'"),
        ("seed: seed of the run.", "small letter"),
        ("seed: Seed of the run", "full stop"),
        ("seed, other (int): whose run it is.", "begins with 'whose'"),
        ("seed:\n            that starts the run.", "begins with 'that'"),
        ("seed: Seed of the run.", None),
        ("seed: Whether it is\n            of the run.", None),
        ("seed: w~, the compressed point.", None),
    ],
)
def test_faults_of_an_argument(tmp_path: Path, entry: str, fault: str | None) -> None:
    file = tmp_path / "module.py"
    file.write_text(f'def run(seed):\n    """Runs.\n\n    Args:\n        {entry}\n    """\n')
    listed = list(offences(file))
    if fault is None:
        assert not listed
    else:
        ((line, text),) = listed
        assert line == 5
        assert fault in text


def test_other_sections(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        'def run():\n    """Runs.\n\n    Returns:\n        what was run,\n        in the end.\n\n'
        "    Raises:\n        ValueError: If it cannot.\n        OSError: when it cannot.\n"
        '    """\n'
    )
    assert [line for line, _ in offences(file)] == [5, 10]


def test_names_of_variables(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "def run(one):\n    found = one\n    for place in found:\n        print(place)\n"
        "    return [one for one in found]\n"
    )
    assert sorted(line for line, _ in offences(file)) == [1, 2, 3, 5]
