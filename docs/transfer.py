"""Draws docs/transfer.png, the error of transferred sparse models against that of dense ones.

It reads the files in results/ that `torchcram transfer --results results` has written.
"""

from __future__ import annotations

import json
from pathlib import Path

from torchcram.experiments.evaluation.results import read_results
from torchcram.report.transfer import summarize

ROOT = Path(__file__).parent.parent
RESULTS, PICTURE = ROOT / "results", ROOT / "docs" / "transfer.png"
SOURCES = "tiny-imagenet-200/resnet18-64"
MEAN = "mean over the tasks"
TITLES = {
    "caltech101-64": "Caltech-101",
    "cifar10-jpeg": "CIFAR-10 (as JPEG)",
    "digits": "Digits",
}
STYLES = {  # name, colour, marker, line
    "sgd": ("SGD", "#d55e00", "s", "--"),
    "sam": ("SAM", "#e69f00", "v", "--"),
    "cram-plus-multi": ("CrAM+", "#0072b2", "o", "-"),
    "cram-plus-multi-1x": ("CrAM+, 1.0x", "#cc79a7", "D", "-"),
}

Curve = list[tuple[float, float]]


def read_curves(results: Path = RESULTS) -> dict[str, dict[str, Curve]]:
    """Returns the curves of every task and of their mean, by method.

    A point is the sparsity of the compressed weights and the relative increase in error, both in
    percent. The PNG file carries them as its description.

    Args:
        results: Folder of results.
    """
    summary = summarize(read_results(results))
    curves: dict[str, dict[str, Curve]] = {}
    for method in STYLES:
        for row in summary.of([f"{SOURCES}/{method}"]).rows:
            values = {error.task: error.increase for error in row.tasks} | {MEAN: row.mean}
            for task, value in values.items():
                if value is not None:
                    point = (round(100 * row.sparsity, 2), round(100 * value, 2))
                    curves.setdefault(task, {}).setdefault(method, []).append(point)
    return {task: curves[task] for task in (MEAN, *sorted(set(curves) - {MEAN})) if task in curves}


def draw(results: Path = RESULTS, picture: Path = PICTURE) -> None:
    """Writes the picture.

    Args:
        results: Folder of results.
        picture: File to write.

    Raises:
        ValueError: If there are no results to draw.
    """
    curves = read_curves(results)
    if not curves:
        raise ValueError(f"{results} has no results of transfers from {SOURCES}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    size = (2 + 2.6 * len(curves), 3.4)
    figure, grid = pyplot.subplots(
        1, len(curves), figsize=size, layout="constrained", squeeze=False, sharex=True
    )
    for axis, (task, of_task) in zip(grid[0], curves.items(), strict=True):
        for method, points in of_task.items():
            name, color, marker, line = STYLES[method]
            x, y = zip(*sorted(points), strict=True)
            axis.plot(x, y, color=color, marker=marker, linestyle=line, linewidth=2, label=name)
        axis.axhline(0, color="#808080", linewidth=1)
        axis.set(title=TITLES.get(task, task), xlabel="zeros held, %")
        axis.set_xticks([0, 50, 80, 90])
        axis.grid(color="#e4e4e4")
        axis.set_axisbelow(True)
    grid[0][0].set_ylabel("increase in error\nover the dense model, %")
    grid[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(picture, dpi=150, metadata={"Description": json.dumps(curves)})
    pyplot.close(figure)


if __name__ == "__main__":
    draw()
