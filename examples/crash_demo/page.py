"""Write the self-contained page around the picture: verdict, numbers, kills, comparison, and a note on every mark."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path

from compare import Row
from matplotlib.figure import Figure
from picture import Notes
from records import Job, Run, typical_stall

from ckpt_core.report import read_events, seconds_in_words, totals_of

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Killed, resumed, and the same bits</title>
<style>
:root {{ color-scheme: light; --ink: #1f2933; --muted: #6b7785; --line: #e3e8ee; --good: #12564f; --bad: #d6293e; }}
* {{ box-sizing: border-box; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #f5f7f9; margin: 0; }}
main {{ max-width: 1500px; margin: 0 auto; padding: 28px 24px 60px; }}
h1 {{ font-size: 28px; margin: 0 0 4px; }}
h2 {{ font-size: 18px; margin: 36px 0 10px; }}
p.lead {{ color: var(--muted); margin: 0 0 20px; max-width: 900px; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin-bottom: 20px; }}
.card {{ background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }}
.card b {{ display: block; font-size: 24px; }}
.card span {{ color: var(--muted); }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }}
.picture {{ background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 8px; overflow-x: auto; }}
.picture svg {{ width: 100%; min-width: 1000px; height: auto; display: block; }}
.picture [data-note] {{ cursor: help; }}
.picture [data-note]:hover {{ filter: brightness(0.85); }}
table {{ border-collapse: collapse; background: #fff; border: 1px solid var(--line); width: 100%; }}
th, td {{ text-align: left; padding: 7px 14px; border-bottom: 1px solid var(--line); }}
th {{ color: var(--muted); font-weight: 600; }}
#note {{ position: fixed; pointer-events: none; background: var(--ink); color: #fff; padding: 5px 10px;
  border-radius: 6px; font-size: 13px; max-width: 340px; display: none; z-index: 9; }}
</style>
</head>
<body>
<main>
<h1>Killed, resumed, and the same bits</h1>
<p class="lead">A small GPT is trained three times on {processes} processes with the same seed: left alone, killed by
SIGKILL and resumed, and with Lightning's own checkpoints. Point at any mark in the picture to read what it is.</p>
<div class="cards">{cards}</div>
<div class="picture">{picture}</div>
<h2>Kills</h2>
{kills}
<p>What checkpoints have cost: <a href="killed/report.html">report of the killed run</a>,
<a href="uninterrupted/report.html">of the uninterrupted one</a>.</p>
<h2>The killed and resumed run beside the uninterrupted one</h2>
{comparison}
</main>
<div id="note" role="status"></div>
<script>
const notes = {notes};
const box = document.getElementById("note");
for (const [id, sentence] of Object.entries(notes)) {{
  const mark = document.getElementById(id);
  if (!mark) continue;
  mark.dataset.note = sentence;
  mark.addEventListener("mousemove", event => {{
    box.textContent = sentence;
    box.style.display = "block";
    box.style.left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8) + "px";
    box.style.top = event.clientY + 18 + "px";
  }});
  mark.addEventListener("mouseleave", () => box.style.display = "none");
}}
</script>
</body>
</html>
"""


def as_svg(figure: Figure) -> str:
    """Return the figure as an SVG element for a page, without the header and the name spaces of a file."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    element = file.getvalue()
    element = element[element.index("<svg") :]
    return re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", element)


def card(value: str, caption: str, kind: str = "") -> str:
    return f'<div class="card"><b class="{kind}">{html.escape(value)}</b><span>{html.escape(caption)}</span></div>'


def as_table(head: list[str], lines: list[list[str]]) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(line, "td") for line in lines) + "</table>"


def kill_line(number: int, job: Job, run: Run) -> list[str]:
    """Return the table row of a kill: what it hit and what it cost."""
    successor = run.jobs[run.jobs.index(job) + 1]
    cut = ", ".join(Path(path).name for path in job.during_save)
    return [
        f"kill {number}",
        f"{job.ended - run.start:.1f} s",
        job.aim,
        cut or "none",
        str(job.steps[-1].number) if job.steps else "none",
        str(successor.steps[0].number - 1) if successor.steps else "none",
        str(len(job.lost)),
    ]


def write_page(path: Path, figure: Figure, notes: Notes, runs: list[Run], rows: list[Row]) -> None:
    """Write the page.

    Args:
        path: Path of the page.
        figure: The picture.
        notes: A sentence about every mark of the picture by its id.
        runs: The uninterrupted and the killed run, and the one with Lightning's own checkpoints.
        rows: The comparison of the first two.
    """
    alone, killed, stock = runs
    totals = totals_of(read_events([str(killed.directory / "events.jsonl")]))
    exact = all(row.equal for row in rows)
    repeated = " + ".join(str(len(job.lost)) for job in killed.kills)
    cards = [
        card(f"bit-exact: {'yes' if exact else 'no'}", "weights, optimizer and loss logs", "good" if exact else "bad"),
        card(f"{len(killed.kills)} kills", "SIGKILL to all processes at once"),
        card(f"{repeated} steps", "repeated after the kills"),
        card(f"{1000 * typical_stall(alone).seconds:.0f} ms", "a typical save with AsyncCheckpointIO stops training"),
        card(f"{1000 * typical_stall(stock).seconds:.0f} ms", "a typical save of Lightning's own stops training"),
        card(f"{totals['share_of_run']:.1%}", "of the killed run was spent waiting for checkpoints"),
        card(seconds_in_words(totals["interruption_seconds"]), "is what its kills cost, restarts included"),
    ]
    kills = as_table(
        ["", "after", "aimed", "write cut off", "last step done", "resumed from step", "steps repeated"],
        [kill_line(number, job, killed) for number, job in enumerate(killed.kills, start=1)],
    )
    comparison = as_table(
        ["", "uninterrupted", "killed and resumed", "same bits"],
        [[row.part, row.left, row.right, "yes" if row.equal else f"no: {row.difference}"] for row in rows],
    )
    page = TEMPLATE.format(
        processes=len(list(alone.directory.glob("steps-rank*.jsonl"))),
        cards="".join(cards),
        picture=as_svg(figure),
        kills=kills,
        comparison=comparison,
        notes=json.dumps(notes).replace("</", "<\\/"),
    )
    path.write_text(page, encoding="utf-8")
