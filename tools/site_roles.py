"""A hook of mkdocs that replaces roles in docstrings, such as ``:class:`~a.B```, by the name alone."""

from __future__ import annotations

import re

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):\s*<code>(?:~(?:\w+\.)*)?([\w.]+)</code>")


def on_page_content(html: str, **_: object) -> str:
    """Return the HTML of a page with names instead of roles."""
    return _ROLE.sub(r"<code>\1</code>", html)
