"""Draws docs/transfer.png, the error of transferred sparse models against that of dense ones.

It reads the files in results/ that `torchcram transfer --results results` has written. Models
that a method trained for single sparsities, such as acdc-k80 and acdc-k90, share a curve.
"""

from __future__ import annotations

import re
from pathlib import Path

import figures
from figures import RESULTS

from torchcram.experiments.evaluation.results import read_results
from torchcram.report.transfer import summarize

PICTURE = figures.DOCS / "transfer.png"
SOURCES = "tiny-imagenet-200/resnet18-64"
MEAN = "mean over the tasks"
TITLES = {
    "caltech101-64": "Caltech-101",
    "cifar10-jpeg": "CIFAR-10 (as JPEG)",
    "digits": "Digits",
}
FOR_ALL = ("sgd", "sam", "cram-plus-k50", "cram-plus-multi", "cram-plus-multi-1x")
PER_TARGET = ("gradual-magnitude", "acdc", "str", "lottery-tickets", "gradual-obs")

Curve = list[tuple[float, float]]


def read_curves(results: Path = RESULTS) -> dict[str, dict[str, Curve]]:
    """Returns the curves of every task and of their mean, by method.

    A point is the sparsity of the compressed weights and the relative increase in error, both in
    percent. The PNG file carries them as its description.

    Args:
        results: Folder of results.
    """
    curves: dict[str, dict[str, Curve]] = {}
    for row in summarize(read_results(results)).rows:
        if (method := _method(row.source)) is not None:
            values = {error.task: error.increase for error in row.tasks} | {MEAN: row.mean}
            for task, value in values.items():
                if value is not None:
                    point = (round(100 * row.sparsity, 2), round(100 * value, 2))
                    curves.setdefault(task, {}).setdefault(method, []).append(point)
    return {
        task: {
            method: sorted(curves[task][method])
            for method in (*FOR_ALL, *PER_TARGET)
            if method in curves[task]
        }
        for task in (MEAN, *sorted(set(curves) - {MEAN}))
        if task in curves
    }


def _method(source: str) -> str | None:
    """Returns the method of a source by the name of its recipe; None if it is not drawn."""
    task_and_model, _, name = source.rpartition("/")
    if task_and_model != SOURCES:
        return None
    method = re.sub(r"-k[0-9.]+$", "", name)
    return name if name in FOR_ALL else method if method in PER_TARGET else None


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
    figure, (axes,) = figures.new_figure(1, len(curves), size=(3.5 + 2.6 * len(curves), 3.4))
    for axis, (task, of_task) in zip(axes, curves.items(), strict=True):
        for method, points in of_task.items():
            style = figures.STYLES[method]
            x, y = zip(*points, strict=True)
            axis.plot(x, y, linewidth=2, label=style.label, **style.options)
        axis.axhline(0, color="#808080", linewidth=1)
        axis.set(title=TITLES.get(task, task), xlabel="zeros held, %")
        axis.set_xticks([0, 50, 80, 90])
        axis.set_xlim(-5, 95)
        figures.add_grid(axis)
    axes[0].set_ylabel("increase in error\nover the dense model, %")
    figures.add_legend(figure, axes, loc="outside right upper", fontsize=9)
    figures.save(figure, picture, curves)


if __name__ == "__main__":
    draw()
