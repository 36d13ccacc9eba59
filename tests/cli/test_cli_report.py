import shlex
from pathlib import Path

import pytest
from commands import command, fail, succeed
from kills import full_disk, needs_limits
from result_samples import cram, sgd

from torchcram.experiments.evaluation.results import write_result

MARKED = "# Results\n\n<!-- results:cifar/net sgd sam -->\nold\n<!-- end results -->\n"


@pytest.fixture(autouse=True)
def _results(_here):
    for one in (sgd(), cram()):
        write_result(one, Path("results") / one.path)


def test_the_page_of_runs_and_result_files(run):
    write_result(sgd(), "sgd.json")
    done = succeed("report", run, "sgd.json", "--out", "pages/one.html")
    assert done.stdout == "report: pages/one.html\n"
    page = Path("pages/one.html").read_text()
    assert "digits / convnet-digits" in page
    assert "cifar / net" in page
    assert "training loss at the weights" in page  # the curves of the run's log


def test_the_page_of_a_folder_of_results():
    succeed("report", "results")
    page = Path("report.html").read_text()
    assert "CrAM+-Multi" in page
    assert "training loss" not in page


def test_what_a_page_cannot_be_made_of_is_named(run):
    (run / "result.json").unlink()
    assert f"finish its training, or run `torchcram compress {run}`" in fail("report", run)
    Path("empty").mkdir()
    assert "empty is neither a run folder nor a folder of results" in fail("report", "empty")
    assert "missing.json" in fail("report", "missing.json")
    Path("bad.json").write_text("{}")
    assert "bad.json: task is missing" in fail("report", "bad.json")
    assert not Path("report.html").exists()


@needs_limits
def test_a_full_disk_is_a_line_with_the_path():
    with full_disk(300):
        assert fail("report", "results", code=1) == "error: report.html: File too large"
    assert not Path("report.html").exists()


def test_stale_tables_are_found_and_written():
    Path("README.md").write_text(MARKED)
    Path("docs").mkdir()
    Path("docs/results.md").write_text(MARKED.replace("sgd sam", "cram-plus"))
    line = ["results", "--check"]
    done = command(*line)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "stale: README.md: cifar/net sgd sam",
        "stale: docs/results.md: cifar/net cram-plus",
        "to update: torchcram results --write README.md docs/results.md",
    ]
    assert "old" in Path("README.md").read_text()
    done = succeed("results", "--write", "README.md")
    assert done.stdout == "written: README.md\n"
    assert "88.31" in Path("README.md").read_text()
    assert succeed("results", "--check", "README.md").stdout == "all up to date\n"
    assert command(*line).stderr.startswith("stale: docs/results.md")
    assert succeed("results", "--write").stdout == "written: docs/results.md\n"
    assert succeed("results", "--write").stdout == "all up to date\n"
    assert succeed(*line).stdout == "all up to date\n"
    write_result(cram(), "results/cifar/net/sam.json")  # which belongs elsewhere
    assert "belongs in" in fail(*line)


def test_results_are_shown():
    done = succeed("results")
    assert "cifar/net/sgd" in done.stdout
    assert "over 3 seeds" in done.stdout


def test_what_to_update_names_the_results_too():
    Path("README.md").write_text(MARKED)
    Path("results").rename("my results")
    done = command("results", "--check", "--results", "my results")
    line = done.stderr.splitlines()[-1].partition("to update: torchcram ")[2]
    assert succeed(*shlex.split(line)).stdout == "written: README.md\n"


def test_bad_input_is_a_line():
    assert "FILE needs --write or --check" in fail("results", "README.md")
    assert "exclude each other" in fail("results", "--check", "--write")
    assert "none: no such folder" in fail("results", "--results", "none")
    assert "none of README.md, docs/results.md exists here" in fail("results", "--check")
    Path("empty").mkdir()
    assert "empty has no results" in fail("results", "--results", "empty")
    Path("README.md").write_text(MARKED.replace("<!-- end results -->", ""))
    before = Path("README.md").read_bytes()
    assert "README.md: " in fail("results", "--write")
    assert Path("README.md").read_bytes() == before
