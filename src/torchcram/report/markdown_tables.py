"""Tables of results in Markdown, and the marked sections of files that hold them.

A table stands between the lines `<!-- results:cifar10/resnet20 sgd sam -->` and
`<!-- end results -->`; see `markdown_table` for what the name means. That of transfers stands after
`<!-- results:transfer tiny-imagenet-200/resnet18-64 sgd sam -->`, and that of costs after
`<!-- results:costs cifar10/resnet20 sgd dpf -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torchcram.experiments.evaluation.results import Result, read_results
from torchcram.experiments.io.files import slug, write_atomically
from torchcram.experiments.metrics import less_is_better
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.overrides import DISTILLED, FINETUNE
from torchcram.report import costs, summary, transfer
from torchcram.report.summary import change_text, score_text

NOT_RUN = "not run yet"
TRANSFER = "transfer"  # first word of a section on transfers
COSTS = "costs"  # first word of a section on what several targets cost
TRAINED_ON = {"fine-tuned@": FINETUNE, "distilled@": DISTILLED}  # words, and marks in methods
_NAME = re.compile(r"([^\s/]+)/([^\s/]+)((?:\s+[^\s/]+)*)")

END = "<!-- end results -->"
_MARKER = re.compile(
    r"^<!-- (?:results:(?P<name>\S(?:.*\S)?)|(?P<end>end results)) -->[ \t]*\r?$", re.MULTILINE
)


def markdown_table(results: Iterable[Result], name: str) -> str:
    """Returns the table that the name of a marked section describes.

    Args:
        results: Results of any tasks and models.
        name: Task and model, which stand for all methods in alphabetical order. Methods after them,
            separated by blanks, choose these methods in this order: "cifar10/resnet20 sgd sam";
            a method without a result gets a row that says so. Operators among them choose the
            targets in this order: "squad/minilm-l6 adam obs@uniform:0.5". Words that end with @
            give every method a further row: "obs@" with the same targets by that pruner,
            "fine-tuned@" and "distilled@" with the targets trained on, and "obs@fine-tuned@" with
            the targets of that pruner trained on. "transfer" before it all stands for the models
            of these methods on other tasks: "transfer cifar10/resnet20 sgd sam". "costs" before it
            all stands for the passes that several targets need: "costs cifar10/resnet20 sgd dpf
            global:0.8 global:0.9".

    Raises:
        ValueError: If the name is of another form.
    """
    if name.partition(" ")[0] == TRANSFER:
        return _transfer_table(results, name.partition(" ")[2].strip())
    if name.partition(" ")[0] == COSTS:
        return _costs_table(results, name.partition(" ")[2].strip())
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{name!r} names no results; allowed: task/model or task/model method ... target ..."
        )
    task, model, words = match[1], match[2], match[3].split()
    chosen = [word for word in words if summary.is_operator(word)]
    further = [word for word in words if word.endswith("@")]
    named = [word for word in words if word not in (*chosen, *further)]
    known = {r.method: r for r in results if (r.task, r.model) == (task, model)}
    methods = named or sorted(known)
    shown = [known[method] for method in methods if method in known]
    targets = chosen or summary.sort_operators(
        operator for result in shown for operator in summary.summaries(result)
    )
    header = ["method", "dense", *map(_code, targets), "seeds", "epochs", "passes", "min"]
    rows = []
    for method in methods:
        if method not in known:
            rows.append([_title(f"{task}/{model}/{method}"), NOT_RUN, *[""] * (len(header) - 2)])
            continue
        rows.append(_markdown_row(known[method], targets, data=len({r.data for r in shown}) > 1))
        for kind in further:
            cells = [_further_cell(known, method, kind, target) for target in targets]
            if any(cells):
                how = kind[:-1].replace("@", ", ")
                length = _further_cost(known, method, kind, targets)
                rows.append([_escaped(f"- {how}"), "", *cells, "", *length, ""])
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", _note(shown)]) + "\n"


def _costs_table(results: Iterable[Result], name: str) -> str:
    """Returns the table of costs for a model on a task, of all methods or some."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{COSTS} {name!r} names no results; allowed: task/model method ... target ..."
        )
    words = match[3].split()
    targets = [word for word in words if summary.is_operator(word)]
    methods = [word for word in words if word not in targets]
    own = [result for result in results if (result.task, result.model) == (match[1], match[2])]
    comparison = costs.compare_costs(own, targets).one(f"{match[1]}/{match[2]}")
    if comparison is None:
        return f"{NOT_RUN[0].upper()}{NOT_RUN[1:]}.\n"
    return costs_markdown(comparison.of(methods) if methods else comparison)


def costs_markdown(comparison: costs.CostComparison) -> str:
    """Returns a row per method, and a note on what the numbers are."""
    header, rows = costs.cells(comparison)
    first = len(header) - len(comparison.targets) - 1
    header = [*header[:first], *map(_code, comparison.targets), header[-1]]
    lines = [header, ["---", *["--:"] * (len(header) - 1)]]
    lines += [[_escaped(row[0]), *row[1:]] for row in rows]
    note = costs.note(comparison)
    note = f"{note[0].upper()}{note[1:]}."
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", note]) + "\n"


def _transfer_table(results: Iterable[Result], name: str) -> str:
    """Returns the table of transfers from the models of a task, by all methods or some."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{TRANSFER} {name!r} names no sources; allowed: task/model method ...")
    everything = transfer.summarize(results)
    prefix = f"{match[1]}/{match[2]}/"
    own = [row.source for row in everything.rows if row.source.startswith(prefix)]
    named = [prefix + method for method in match[3].split()]
    shown = everything.of(named or list(dict.fromkeys(own)))
    missing = [source for source in named if source not in own]
    return transfer_markdown(shown, missing)


def transfer_markdown(summary: transfer.TransferSummary, missing: Sequence[str] = ()) -> str:
    """Returns a row per source and sparsity, and a note on what the numbers are.

    Args:
        summary: Transfers to show.
        missing: Recipes of sources that get a row which says that they have no result.
    """
    header, texts = transfer.cells(summary)
    rows = [[_escaped(row[0]), _code(row[1]), *row[2:]] for row in texts]
    rows += [[_title(source), NOT_RUN, *[""] * (len(header) - 2)] for source in missing]
    header = [*header[:2], *map(_code, header[2:-1]), header[-1]]
    lines = [header, ["---", "---", *["--:"] * (len(header) - 2)], *rows]
    note = f"{transfer.NOTE[0].upper()}{transfer.NOTE[1:]}."
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", note]) + "\n"


def _markdown_row(result: Result, targets: Sequence[str], data: bool) -> list[str]:
    cells = [_cell(result, target) for target in targets]
    cost = [summary.epochs(result), summary.passes(result), f"{summary.minutes(result):.1f}"]
    name = result.title + (f" on {result.data}" if data else "")
    dense = str(summary.dense(result)) if summary.trained_for(result) is None else ""
    return [_escaped(name), dense, *cells, str(len(result.seeds)), *cost]


def _cell(result: Result, target: str) -> str:
    if target == summary.trained_for(result):
        return str(summary.trained_score(result))  # there is nothing that it was before
    row = summary.summaries(result).get(target)
    if row is None:
        return ""
    # not the spread over calibration sets, which is none over seeds
    single = score_text(row.after.mean, result.metric)
    accuracy = str(row.after) if len(result.seeds) > 1 else single
    return f"{accuracy} ({change_text(row.change.mean, result.metric)})"


def _further_cell(known: Mapping[str, Result], method: str, kind: str, target: str) -> str:
    if not kind.endswith(tuple(TRAINED_ON)):
        return _cell(known[method], kind + target)
    result, operator = _trained_on(known, method, kind, target)
    return "" if result is None else _cell(result, operator)


def _further_cost(
    known: Mapping[str, Result], method: str, kind: str, targets: Sequence[str]
) -> list[str]:
    """Returns the epochs and the passes of a method and of its fine-tuning; a pruner has none."""
    if not kind.endswith(tuple(TRAINED_ON)):
        return ["", ""]
    trained = [_trained_on(known, method, kind, target)[0] for target in targets]
    tuned = [result for result in trained if result is not None]
    return [summary.epochs(known[method], tuned), summary.passes(known[method], tuned)]


def _trained_on(
    known: Mapping[str, Result], method: str, kind: str, target: str
) -> tuple[Result | None, str]:
    """Returns the result of fine-tuning at a target, if there is one, and the operator there."""
    word = next(word for word in TRAINED_ON if kind.endswith(word))
    operator = kind.removesuffix(word) + target
    return known.get(f"{method}{TRAINED_ON[word]}{slug(operator)}"), operator


def _note(results: Sequence[Result]) -> str:
    """Returns a note on what the numbers are, and on which data and machines they were taken."""
    if not results:
        return "Nothing of this has been run yet."
    data = ", ".join(dict.fromkeys(_escaped(result.data) for result in results))
    machines = dict.fromkeys(_escaped(seed.machine) for r in results for seed in r.seeds)
    metrics = dict.fromkeys(result.metric for result in results)
    ratios = all(map(less_is_better, metrics))
    metric = " and ".join(map(_escaped, metrics))
    change = (
        "ratio to the same model dense" if ratios else "change from the same model dense, in points"
    )
    after = " after batch-norm tuning" if any(map(summary.tuned, results)) else ""
    reached = {result.title: summary.reached(result) for result in results}
    named = "; ".join(f"{_escaped(title)}: {said}" for title, said in reached.items() if said)
    ended = f" Sparsities before the end of training, which changed them: {named}." if named else ""
    return (
        f"Test {metric}{'' if ratios else ' in %'} on {data}{after}; in brackets the "
        f"{change}. Mean ± standard deviation where there are several seeds. "
        f"{summary.PASSES.capitalize()}. Min: minutes of one training, {', '.join(machines)}."
        f"{ended}"
    )


def _title(name: str) -> str:
    """Returns the title of a bundled recipe; the name of the method for any other."""
    try:
        return _escaped(load_recipe(name).title)
    except ValueError:
        return _code(name.split("/")[-1])


def _code(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").replace("|", "\\|").split()) + "`"


def _escaped(text: str) -> str:
    """Returns a text in one line, with the special characters of Markdown and HTML escaped."""
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", " ".join(text.split()))


# Marked sections


def update_marked(text: str, name: str, table: str) -> str:
    """Puts a table between `<!-- results:NAME -->` and `<!-- end results -->`.

    Args:
        text: Text of a Markdown file. The markers stand on lines of their own.
        name: Name of the section; if several have this name, all are replaced.
        table: Table with or without a final newline; it must not contain a marker.

    Raises:
        ValueError: If no section has this name, or a marker lacks its counterpart.
    """
    if _MARKER.search(table):
        raise ValueError(f"the table for {name!r} contains a marker of its own")
    if name not in marked(text):
        raise ValueError(f"no section is marked '<!-- results:{name} -->'; marked: {marked(text)}")
    parts, done = [], 0
    for begin, end in _sections(text):
        if begin["name"] == name:
            parts += [text[done : begin.end()], "\n", table.strip("\n"), "\n"]
            done = end.start()
    return "".join(parts) + text[done:]


def marked(text: str) -> list[str]:
    """Returns the names of the marked sections of a Markdown file, in their order, each once."""
    return list(dict.fromkeys(begin["name"] for begin, _ in _sections(text)))


def stale(files: Iterable[str | Path], results_dir: str | Path) -> list[str]:
    """Returns the marked sections, as "file: name", whose tables are out of date."""
    results = read_results(results_dir)
    return [
        f"{path}: {name}"
        for path in map(Path, files)
        for text in [_read(path)]
        for name in marked(text)
        if _update(text, [name], results) != text
    ]


def update_files(files: Iterable[str | Path], results_dir: str | Path) -> list[Path]:
    """Rewrites all marked tables; returns the files that changed. After an error none has."""
    results, changed = read_results(results_dir), {}
    for path in map(Path, files):
        text = _read(path)
        new = _update(text, marked(text), results)
        if new != text:
            changed[path] = new
    for path, new in changed.items():
        write_atomically(path, new.encode())
    return list(changed)


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode()  # as it is, ends of lines included
        _sections(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return text


def _update(text: str, names: Iterable[str], results: Sequence[Result]) -> str:
    for name in names:
        text = update_marked(text, name, markdown_table(results, name))
    return text


def _sections(text: str) -> list[tuple[re.Match[str], re.Match[str]]]:
    """Returns the markers in pairs; raises ValueError for a marker without its counterpart."""
    markers = list(_MARKER.finditer(text))
    for index, marker in enumerate(markers):
        line = text.count("\n", 0, marker.start()) + 1
        if (marker["end"] is None) != (index % 2 == 0):
            raise ValueError(f"line {line}: '{marker[0].strip()}' stands in the wrong order")
    if len(markers) % 2:
        raise ValueError(f"'{markers[-1][0].strip()}' is not followed by '{END}'")
    return list(zip(markers[::2], markers[1::2], strict=True))
