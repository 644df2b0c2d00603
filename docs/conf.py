"""The documentation site: ``make docs`` builds it into build/site, every warning an error."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sigkernels

project = "sigkernels"
author = copyright = "The sigkernels authors"
release = version = sigkernels.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results", "img"]
templates_path: list[str] = []
nitpicky = True
# What other projects and the standard library document; no inventory is fetched, so that a build needs no network.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|numpy|np|nn|collections|concurrent|functools|typing|dataclasses|os|pathlib|sklearn|argparse|enum)\b.*",
    ),
    (
        "py:.*",
        r"(Tensor|ndarray|NDArray|Iterable|Iterator|Sequence|Mapping|Callable|Executor|Path|PathLike|TypeAlias).*",
    ),
    ("py:.*", r"(optional|L|_Result|Prior|Self)"),
    # Types of the inside that signatures of the outside mention.
    (
        "py:.*",
        r"sigkernels\.(verify\.(question|ledger|closed_groups)|losses\.kernel_params|metrics\.accumulator\.A|layer|sharding)\b.*",
    ),
]

html_theme = "furo"
html_title = f"sigkernels {release}"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00798c", "color-brand-content": "#00798c"},
    "dark_css_variables": {"color-brand-primary": "#4fc3d5", "color-brand-content": "#4fc3d5"},
}
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_show_sphinx = False
html_copy_source = False

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = ["myst.header"]  # the parts of the README that pages include start at a second heading

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Example", "examples_style")]

# --- a name in code font is a link to its entry ---------------------------------------------------------------

_CALL = re.compile(r"(?:sk\.|sigkernels\.)?([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\))?")
_OTHERS = ("hf.HeadMixin", "suggest.Suggestion", "verify.certificate.Certificate", "verify.check.Proof")
_OTHERS += ("verify.repair.HeadPlan", "verify.repair.Repair", "verify.report.CheckResult", "verify.report.StageReport")
_INSTANCES = {"head": ("Head", "DFTHead"), "report": ("Report",)}  # how texts call an object of the class


def _documented() -> dict[str, str]:
    """Public names, as a text may write them, and the entries that they lead to."""
    found = {path.rpartition(".")[2]: f"sigkernels.{path}" for path in _OTHERS}
    for where in ("", "functional", "metrics", "signs", "datasets"):
        module = importlib.import_module(f"sigkernels.{where}".rstrip("."))
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                continue
            entry = f"{module.__name__}.{name}"
            found.setdefault(name, entry)
            found[f"{where}.{name}".lstrip(".")] = entry
            found.update({f"{name}.{method}": f"{entry}.{method}" for method in _methods(value)})
    for word, classes in _INSTANCES.items():
        for name in classes:
            for method in _methods(getattr(sigkernels, name)):
                found.setdefault(f"{word}.{method}", f"sigkernels.{name}.{method}")
    return found


def _methods(value: object) -> list[str]:
    """The public methods of a class that are documented where it is."""
    own = vars(value).items() if isinstance(value, type) and not issubclass(value, sigkernels.Loss) else ()
    return [
        name
        for name, method in own
        if not name.startswith("_") and getattr(method, "__doc__", None) and callable(method)
    ]


class LinkNames(SphinxTransform):
    """``DFTHead``, ``sk.verify(W, sets)``, ``LabelSets.of`` in code font become cross references."""

    default_priority = 300
    names = _documented()

    def apply(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            target = self._target(literal.astext())
            if target is None or _inside(literal, (nodes.reference, nodes.title, pending_xref)):
                continue
            link = pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refwarn=True, refdoc=self.env.docname
            )
            literal.replace_self(link)
            link += literal

    def _target(self, text: str) -> str | None:
        written = _CALL.fullmatch(text)
        return self.names.get(written.group(1)) if written else None


def _inside(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    while (node := node.parent) is not None:
        if isinstance(node, kinds):
            return True
    return False


def _no_type_in_prose(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before the first colon of a property's docstring for its type: give it an empty one."""
    if what == "property" and lines:
        lines[0] = f": {lines[0]}"


def _no_private_arguments(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str, str | None] | None:
    """``_verb`` of ``Head.forward`` is how the verbs pass through ``__call__``."""
    return None if signature is None else (re.sub(r", _\w+: [^=]*= None", "", signature), result)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _no_type_in_prose, priority=400)  # before Napoleon
    app.connect("autodoc-process-signature", _no_private_arguments)
    app.add_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
