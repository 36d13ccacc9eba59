"""Settings of the documentation site, which `make docs` builds."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, cast

from torchcram import __version__

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "torchcram"
author = "The torchcram authors"
copyright = author  # noqa: A001
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
default_role = "code"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
viewcode_line_numbers = False

# The site is built offline: names of other packages are shown, not linked.
nitpick_ignore_regex = [(r"py:.*", r"(?!torchcram).*")]
nitpick_ignore = [
    ("py:class", "torchcram.layers.LayerWeights"),
    ("py:class", "torchcram.batches.Batch"),  # type variables
    ("py:class", "torchcram.operators.parse.Kind"),
    ("py:class", "torchcram.pruners.parse.Kind"),
    ("py:class", "torchcram.baselines.registry.Kind"),
]

html_theme = "pydata_sphinx_theme"
html_title = "torchcram"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
ALONE = ("index", "get-started", "concepts", "choosing", "faq", "results", "performance")
html_sidebars = {page: [] for page in ALONE}
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 8,
    "navbar_persistent": ["search-button"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}

PUBLIC_MODULES = (
    "torchcram",
    "torchcram.artifact",
    "torchcram.runtime",
    "torchcram.pruners",
    "torchcram.baselines",
)
PUBLIC_NAMES = {
    name: f"{module}.{name}"
    for module in PUBLIC_MODULES
    for name in importlib.import_module(module).__all__
}


def link_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.reference | None:
    """Links a name by the module that exports it, where an annotation has the defining module."""
    public = PUBLIC_NAMES.get(str(node.get("reftarget")).rpartition(".")[2])
    if node.get("refdomain") != "py" or public is None:
        return None
    python, page = env.get_domain("py"), node["refdoc"]
    return python.resolve_xref(env, page, app.builder, "obj", public, node, contnode)


def escape_symbols(*event: object) -> None:
    """Escapes what reStructuredText would take for markup in docstrings.

    |g| is a norm and no substitution; obs@uniform is an operator and no address.
    """
    lines = cast("list[str]", event[-1])
    symbol, outside_code = r"(\||(?<=\w)@(?=\w))", r"(?=[^`]*(?:`[^`]*`[^`]*)*$)"
    lines[:] = [re.sub(symbol + outside_code, r"\\\1", line) for line in lines]


def unlink_absent(*event: object) -> None:
    """Leaves the text of links to what the repository has and the site does not."""
    source = cast("list[str]", event[-1])
    absent = r"\.\./(?:benchmarks|results|examples|CONTRIBUTING\.md(?:#[\w-]+)?)"
    source[0] = re.sub(rf"\[([^\]]+)\]\({absent}\)", r"\1", source[0])


def setup(app: Sphinx) -> None:
    """Registers the handlers above."""
    app.connect("autodoc-process-docstring", escape_symbols)
    app.connect("missing-reference", link_public_name)
    app.connect("source-read", unlink_absent)
