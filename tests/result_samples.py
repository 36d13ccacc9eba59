"""Results that the tests of result files and of their tables share."""

import re

from torchcram.experiments.evaluation.results import Result, SeedResult, TargetResult

VERSIONS = {"torch": "9.8.7", "torchcram": "<6.5.4>"}


def target(operator, after, **others):
    zeros = float(operator[7:]) if re.fullmatch(r"global:[0-9.]+", operator) else 0.13
    values = {"sparsity": zeros, "model_sparsity": zeros * 0.99, "before": after - 0.2, **others}
    return TargetResult(operator=operator, after=after, **values)


def seed(number, dense, accuracies, **others):
    """`accuracies` by operator."""
    targets = tuple(target(operator, after) for operator, after in accuracies.items())
    values = {"seconds": 150.0, "machine": "Abacus 3", "versions": VERSIONS, **others}
    return SeedResult(seed=number, dense=dense, targets=targets, **values)


def result(method, seeds, *, title=None, task="cifar", model="net", data="cifar-jpeg", **recipe):
    plain = {
        "name": f"{task}/{model}/{method}",
        "title": title or method,
        "train": {"epochs": 20, "batch_size": 128},
        "cram": {"rho": 0.15, "operators": ["global:0.5", "global:0.9"], "normalize": None},
        **recipe,
    }
    return Result(
        task=task,
        model=model,
        method=method,
        title=title or method,
        data=data,
        recipe=plain,
        seeds=tuple(seeds),
    )


def sgd():
    """One seed."""
    losses = {"global:0.95": 0.24, "global:0.5": 0.8831, "nm:2:4": 0.71, "int4": 0.62}
    return result("sgd", [seed(0, 0.887, losses)], title="SGD")


def cram():
    """Three seeds; dense and at 0.9 they are 0.01 apart."""
    seeds = [
        seed(
            number,
            0.89 + place / 100,
            {
                "int4": 0.88,
                "global:0.9": 0.87 + place / 100,
                "global:0.5": 0.89,
                "global:0.5+int4": 0.6,
            },
            seconds=60.0 * (place + 1),
        )
        for place, number in enumerate((1, 4, 6))
    ]
    return result("cram-plus", seeds, title="CrAM+-Multi")
