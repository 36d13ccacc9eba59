"""Draws docs/accuracy.png, accuracy against sparsity, from the files in results/."""

from __future__ import annotations

import json
from statistics import mean, stdev

import figures

PICTURE = figures.DOCS / "accuracy.png"
PANELS = {
    "cifar10-jpeg/resnet20": "ResNet20 on CIFAR-10 (as JPEG)",
    "tiny-imagenet-200/resnet18-64": "ResNet18 on Tiny ImageNet",
}
# both with one pass over the training set per epoch
METHODS = {"sgd": "SGD", "cram-plus-multi-1x": "CrAM+, same passes"}
LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95)

Curve = list[tuple[float, float, float]]


def read_curve(panel: str, method: str) -> Curve:
    """Returns sparsity, mean accuracy and its deviation over the seeds, all in percent."""
    seeds = json.loads((figures.RESULTS / panel / f"{method}.json").read_text())["seeds"]
    scores = {0.0: [seed["dense"] for seed in seeds]}
    for level in LEVELS:
        targets = [t for seed in seeds for t in seed["targets"]]
        scores[level] = [t["after"] for t in targets if t["operator"] == f"global:{level}"]
    return [
        (round(100 * level, 2), round(100 * mean(values), 2), round(100 * deviation, 2))
        for level, values in scores.items()
        for deviation in [stdev(values) if len(values) > 1 else 0.0]
    ]


def read_curves() -> dict[str, dict[str, Curve]]:
    """Returns all that the picture shows; the PNG file carries it as its description."""
    return {panel: {name: read_curve(panel, name) for name in METHODS} for panel in PANELS}


def draw() -> None:
    """Writes the picture."""
    figure, (axes,) = figures.new_figure(1, 2, size=(8, 3.4))
    curves = read_curves()
    for axis, (panel, title) in zip(axes, PANELS.items(), strict=True):
        for method in METHODS:
            style = figures.STYLES[method]
            x, y, deviation = zip(*curves[panel][method], strict=True)
            axis.errorbar(x, y, deviation, linewidth=2, **style.options)
            for sparsity, accuracy in list(zip(x, y, strict=True))[-2:]:
                offset, align = ((-8, -4), "right") if method == "sgd" else ((0, 8), "center")
                if method != "sgd" and sparsity == x[-1]:
                    offset, align = (7, -4), "left"
                text = {"textcoords": "offset points", "ha": align, "fontsize": 10}
                point = (sparsity, accuracy)
                axis.annotate(f"{accuracy:.0f}", point, offset, color=style.color, **text)
            at, height = (60, 0.83) if method == "sgd" else (32, 1.05)
            text = {"ha": "center", "color": style.color, "weight": "bold"}
            axis.text(at, height * y[0], METHODS[method], **text)
        axis.set(title=title, ylim=(0, 1.15 * y[0]), xlabel="weights set to zero in one shot, %")
        axis.set_xlim(-5, 104)
        axis.set_xticks([0, 50, 70, 80, 90, 95])
        axis.tick_params(axis="x", labelsize=8)
        figures.add_grid(axis)
    axes[0].set_ylabel("test accuracy, %")
    figures.save(figure, PICTURE, curves)


if __name__ == "__main__":
    draw()
