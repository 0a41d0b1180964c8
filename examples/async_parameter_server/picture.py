"""Draws the space-time diagram: a line for each process, an arrow for each message, and the cut through all of them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from training import SERVERS, WORKERS, data_number

from ckpt_async.consistent_cut import UpdateId

LANES = ("coordinator", *SERVERS, *WORKERS)
BEFORE, AFTER, FOLDED, QUIET, CUT, CRASH = "#1f77b4", "#d62728", "#ff7f0e", "#bbbbbb", "#2ca02c", "#000000"
LEGEND = {
    "update from before the cut": BEFORE,
    "… that arrives after it, and is folded into the copy": FOLDED,
    "update from after the cut": AFTER,
    "pulled parameters": QUIET,
    "the cut: its markers, and where it divides each process": CUT,
}


class Diagram:
    """Draws the trace of one life of the training, from its start to its end or kill.

    Args:
        notes: From :func:`tracing.read_trace`.
        snapshot: Id of the snapshot whose cut is drawn.
        naive: For each process, the time at which it saved for itself.
    """

    def __init__(self, notes: Sequence[Mapping[str, Any]], snapshot: int, naive: Mapping[str, float]) -> None:
        self._notes = [note for note in notes if note["kind"] in {"push", "pulled", "Marker", "Begin"}]
        self._snapshot = snapshot
        self._start = min(note["time"] for note in self._notes)
        self._end = max(note["time"] for note in self._notes)
        self._naive = naive
        self.cut = self._find_cut()

    def _find_cut(self) -> dict[str, float]:
        """Return when each process was cut: a worker before its first marker, a server at the snapshot's first sign."""
        cut: dict[str, float] = {}
        for note in self._notes:
            if note["snapshot"] != self._snapshot:
                continue
            if note["kind"] == "Marker" and note["event"] == "send":
                cut.setdefault(note["sender"], note["time"])
            elif note["event"] == "receive" and note["receiver"] in SERVERS:
                cut.setdefault(note["receiver"], note["time"])
            elif note["kind"] == "Begin" and note["event"] == "send":
                cut.setdefault("coordinator", note["time"])
        return cut

    def messages(self) -> list[tuple[Mapping[str, Any], float, float]]:
        """Return each message that arrived: a note of it, when it was sent, and when it was received."""
        sent: dict[tuple[Any, ...], float] = {}
        found = []
        for note in self._notes:
            key = (
                note["kind"],
                note["sender"],
                note["receiver"],
                str(note["update"]),
                note["snapshot"],
                note["version"],
            )
            if note["event"] == "send":
                sent[key] = note["time"]
            elif key in sent:
                found.append((note, sent[key], note["time"]))
        return found

    def colour(self, note: Mapping[str, Any], received: float) -> str:
        """Return the colour of a message, by its place relative to the cut."""
        if note["kind"] == "pulled":
            return QUIET
        if note["kind"] in {"Marker", "Begin"}:
            return CUT
        if note["snapshot"] >= self._snapshot:
            return AFTER
        return FOLDED if received > self.cut[note["receiver"]] else BEFORE

    def draw(self) -> plt.Figure:
        """Return the picture."""
        figure, axes = plt.subplots(figsize=(13, 6.2), layout="constrained")
        heights = {lane: len(LANES) - position for position, lane in enumerate(LANES)}
        for lane, height in heights.items():
            axes.axhline(height, color="#444444", linewidth=1.2, zorder=1)
            axes.text(-0.01, height, lane, transform=axes.get_yaxis_transform(), ha="right", va="center")
        for note, sent, received in self.messages():
            colour = self.colour(note, received)
            ends = (sent - self._start, heights[note["sender"]]), (received - self._start, heights[note["receiver"]])
            style = {"color": colour, "lw": 0.8 if colour in {QUIET, CUT} else 1.6, "shrinkA": 0, "shrinkB": 0}
            if colour == CUT:
                style["ls"] = "--"
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops={"arrowstyle": "->", **style}, zorder=2)
            if note["kind"] == "push" and note["receiver"] == SERVERS[-1]:
                name = f"Data-{data_number(UpdateId(*note['update'])) + 1}"
                axes.text(ends[0][0], ends[0][1] - 0.22, name, color=colour, ha="center", fontsize=9)
        self._draw_cut(axes, heights)
        for lane, saved in self._naive.items():
            axes.plot(saved - self._start, heights[lane], "x", color="black", markersize=9, markeredgewidth=2, zorder=5)
        axes.axvline(self._end - self._start + 0.03, color=CRASH, linewidth=2)
        axes.text(self._end - self._start + 0.04, len(LANES) + 0.35, "SIGKILL", fontsize=10)
        handles = [Line2D([], [], color=colour, label=label) for label, colour in LEGEND.items()]
        handles.append(
            Line2D([], [], color="black", marker="x", lw=0, label="last save of each process for itself (naive)")
        )
        axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=3, frameon=False, fontsize=9
        )
        axes.set(yticks=[], ylim=(0.4, len(LANES) + 0.7), xlabel="seconds", xlim=(-0.02, None))
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        return figure

    def _draw_cut(self, axes: plt.Axes, heights: Mapping[str, int]) -> None:
        points = [(self.cut[lane] - self._start, heights[lane]) for lane in LANES if lane in self.cut]
        axes.plot(*zip(*points, strict=True), color=CUT, linewidth=5, alpha=0.35, zorder=3)
        axes.plot(*zip(*points, strict=True), "o", color=CUT, markersize=7, zorder=4)

    def save(self, png: Path) -> str:
        """Write the PNG, and return the same picture as SVG."""
        figure = self.draw()
        figure.savefig(png, dpi=130)
        text = io.StringIO()
        figure.savefig(text, format="svg")
        plt.close(figure)
        return text.getvalue()[text.getvalue().index("<svg") :]
