"""What Sphinx is told beside its settings: lexers for our code blocks, and names of the API that become links."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from pygments.lexers.javascript import JavascriptLexer
from pygments.lexers.shell import BashLexer
from sphinx.application import Sphinx

LISTED = ("py:module", "py:class", "py:function", "py:data", "py:exception", "py:method", "py:property")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    # Commands without a prompt, and JSON with comments, which config files may have with hjson.
    app.add_lexer("console", BashLexer)
    app.add_lexer("json", JavascriptLexer)
    app.connect("doctree-resolved", link_names)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Make `mpispeed.zero.Init` in code style a link to its entry of the API reference."""
    known = app.env.domaindata["py"]["objects"]
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext().partition("(")[0]
        if not name.startswith("mpispeed.") or name not in known or _is_linked(literal):
            continue
        found = known[name]
        if found.docname == docname:
            uri = f"#{found.node_id}"
        else:
            uri = f"{app.builder.get_relative_uri(docname, found.docname)}#{found.node_id}"
        reference = nodes.reference("", "", internal=True, refuri=uri)
        literal.replace_self(reference)
        reference += literal


def _is_linked(node: nodes.Node) -> bool:
    """True inside of a link or a heading."""
    while node is not None:
        if isinstance(node, (nodes.reference, nodes.title)):
            return True
        node = node.parent
    return False
