"""Every Python block of the documentation runs, those of a page one after another."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page):
    return BLOCK.findall(page.read_text())


def test_the_readme_is_short_and_has_code():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert blocks(ROOT / "README.md")


@pytest.mark.filterwarnings(
    "ignore:.*lr_scheduler.step:UserWarning",
    "ignore:.*LeafSpec",
    "ignore:.*does not have many workers",
    "ignore:.*pin_memory",
    "ignore:torch.distributed is disabled",
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, capsys):
    names = {"__name__": "page"}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)  # noqa: S102
    if page.name == "README.md":
        assert "nm:2:4" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_are_good(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_steps_of_the_algorithm_are_lines_of_the_code():
    code = (ROOT / "src" / "torchcram" / "optim" / "cram.py").read_text()
    comments = re.findall(r"`(# [^`]+)`", (ROOT / "docs" / "concepts.md").read_text())
    assert len(comments) == 6
    for comment in comments:
        assert f"  {comment}\n" in code, comment
