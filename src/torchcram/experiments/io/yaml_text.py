"""Safe and strict YAML for recipes, in which 5e-4 is a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from torchcram.experiments.io.dataclass_io import shown

_FLOAT = "tag:yaml.org,2002:float"
_CONSTRUCTOR_ERRORS = (  # of PyYAML for a value that its tag does not allow; they name no line
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    OverflowError,
)
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")  # YAML 1.1 wants 5.0e-4


class _Loader(yaml.SafeLoader):
    """Loader that refuses duplicate keys, and aliases, by which data could contain itself."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:  # noqa: ANN401
        if self.check_event(yaml.AliasEvent):
            parser: Any = self  # the stubs of PyYAML have no type for peek_event
            mark = parser.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401
        try:
            return super().construct_object(node, deep)
        except _CONSTRUCTOR_ERRORS as error:
            problem = f"{shown(node.value)} is no {node.tag.rpartition(':')[2]}"
            if isinstance(error, ValueError):
                problem += f", {error}"
            mark = node.start_mark
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} appears twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that indents lists; the resolver below makes it quote texts such as 5e-4."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))


def parse(text: str, where: str) -> Any:  # noqa: ANN401
    """Reads one YAML document.

    Args:
        text: Text of the document.
        where: Origin of the text, such as a file name, for messages.

    Returns:
        Mappings, lists and scalars; None for an empty document.

    Raises:
        ValueError: If the text is not YAML; the message names `where`, the line and the problem.
    """
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not YAML: {_in_words(error)}") from None


def _in_words(error: Exception) -> str:
    """Returns what is wrong with a document in one line, with its place."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    context, problem = getattr(error, "context", None), getattr(error, "problem", None)
    what = ", ".join(filter(None, (context, problem))).replace("'<stream end>'", "the end")
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}"


def dump(data: object) -> str:
    """Writes plain data as YAML that `parse` reads back."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100)
    return text


def merged(base: object, over: object) -> Any:  # noqa: ANN401
    """Returns `base` changed by `over`: mappings are merged, all other values are replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


def override(data: object, texts: Sequence[str]) -> Any:  # noqa: ANN401
    """Returns data changed by overrides such as "cram.rho=0.1", one after another.

    Args:
        data: Nested mappings; sections that a key passes through are made where they are missing.
        texts: Overrides of the form KEY=VALUE, whose values are YAML.

    Raises:
        ValueError: If an override cannot be read; the message names it.
    """
    for text in texts:
        key, equals, value = text.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise ValueError(f"override {text!r}: allowed is KEY=VALUE, such as train.epochs=3")
        over = parse(value, f"override {text!r}")
        for name in reversed(names):
            over = {name: over}
        data = merged(data, over)
    return data
