"""Builds the page about a run of the example: one file, which loads nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
svg { width: 100%; height: auto } table { border-collapse: collapse; margin: 1em 0 }
td, th { border: 1px solid #ccc; padding: .3em .8em; text-align: center } td:first-child { text-align: left }
.wrong { background: #fdd } .right { background: #dfd } code { background: #f3f3f3 }
"""


def build_page(svg: str, tables: Mapping[str, Sequence[Sequence[object]]], words: str) -> str:
    """Return the HTML of the page.

    Args:
        svg: The diagram.
        tables: By title: rows, each a name and how often Data-1, Data-2, ... have been used at the end.
        words: Where each stream resumes, as text.
    """
    body = "\n".join(f"<h3>{html.escape(title)}</h3>{_table(rows)}" for title, rows in tables.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Which model, and which
data?</title><style>{_STYLE}</style></head><body> <h1>Which model, and which data?</h1>
<p>Two parameter servers, three workers at different iterations, Data-1 to Data-9. Then every process is killed.</p>
{svg}
<p>Each process had saved now and then by its own clock (crosses): what they saved does not belong together. The
checkpoint is
the green cut: no arrow from the right of it ends on the left of it, and what crosses it from left to right (orange) was
    added
to the servers' copies as it arrived.</p>
<h2>Which data?</h2><p>{html.escape(words)}.</p>
<h2>Which model?</h2><p>The servers', at the cut. How often each data is in it when the training has gone on to its
end:</p> {body}
</body></html>
"""


def _table(rows: Sequence[Sequence[object]]) -> str:
    width = max(len(row) for row in rows) - 1
    head = "".join(f"<th>Data-{number + 1}</th>" for number in range(width))
    lines = []
    for name, *counts in rows:
        cells = "".join(f'<td class="{"right" if count == 1 else "wrong"}">{count}</td>' for count in counts)
        lines.append(f"<tr><td>{html.escape(str(name))}</td>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(lines)}</table>"
