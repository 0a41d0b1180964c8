"""Draw runs on a time axis: what the training thread did, what was being written to disk, and where it was killed.

Every mark gets a group id and a sentence in :data:`Notes`, so that a page can show it on hover.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from records import Job, Run, Save, Stall, typical_stall

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e8ee"
STEP, LOST, COLLECT, STALL, WRITE, KILL, COMMIT, STARTUP = (
    "#5b8def",
    "#c9d8f7",
    "#ffd08a",
    "#f08c00",
    "#38a89d",
    "#d6293e",
    "#12564f",
    "#eef1f5",
)
TRAINING_ROW, DISK_ROW = 1.0, 0.32
TRAINING_HEIGHT, DISK_HEIGHT = 0.5, 0.3
SYNCHRONOUS_SECONDS = 0.005  # a save that is committed so soon after the stall was written within the stall

Notes = dict[str, str]


@dataclasses.dataclass
class Canvas:
    """An axis on which one moment is zero, and the sentences about the marks on it."""

    axes: Axes
    zero: float
    scale: float
    notes: Notes
    name: str

    def bar(self, row: float, height: float, start: float, end: float, note: str, **style: object) -> None:
        """Draw a bar between two moments; however short, it stays visible."""
        left, right = (self.scale * (moment - self.zero) for moment in (start, end))
        patch = Rectangle((left, row - height / 2), right - left, height, **style)
        patch.set_gid(self._note(note))
        self.axes.add_patch(patch)

    def mark(self, row: float, moment: float, note: str, **style: object) -> None:
        (line,) = self.axes.plot([self.scale * (moment - self.zero)], [row], linestyle="none", **style)
        line.set_gid(self._note(note))

    def _note(self, sentence: str) -> str:
        key = f"{self.name}-{len(self.notes)}"
        self.notes[key] = sentence
        return key


def file_name(save: Save) -> str:
    return Path(save.path).name


def steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def draw_job(canvas: Canvas, job: Job, zoomed: bool) -> None:
    """Draw the steps, stalls, writes and commits of one job."""
    gap = {"edgecolor": "white", "linewidth": 0.8 if zoomed else 0.35}
    for step in job.steps:
        lost = ", lost by the kill and repeated later" if step.lost else ""
        note = f"step {step.number}: {1000 * (step.end - step.start):.0f} ms{lost}"
        color = LOST if step.lost else STEP
        canvas.bar(TRAINING_ROW, TRAINING_HEIGHT, step.start, step.end, note, facecolor=color, zorder=2, **gap)
    for stall in job.stalls:
        note = f"training stands still for {1000 * stall.seconds:.0f} ms, of which the Trainer collects the state here"
        style = {"facecolor": COLLECT, "edgecolor": COLLECT, "linewidth": 0.9, "zorder": 2.5}
        canvas.bar(TRAINING_ROW, TRAINING_HEIGHT, stall.start, stall.end, note, **style)
    for save in job.saves:
        draw_save(canvas, job, save)


def draw_save(canvas: Canvas, job: Job, save: Save) -> None:
    freed = save.freed if save.freed is not None else job.ended
    thin = {"linewidth": 0.9, "zorder": 3}
    note = f"{file_name(save)}: the plugin holds the training for {1000 * (freed - save.started):.0f} ms"
    canvas.bar(TRAINING_ROW, TRAINING_HEIGHT, save.started, freed, note, facecolor=STALL, edgecolor=STALL, **thin)
    if save.freed is None:
        return
    note = f"{file_name(save)}: {save.bytes / 1e6:.0f} MB "
    if save.committed is None:
        note += "not yet on the disk when the job was killed; never visible as a checkpoint"
        style = {"facecolor": "white", "edgecolor": KILL, "hatch": "//////"}
        canvas.bar(DISK_ROW, DISK_HEIGHT, save.freed, job.ended, note, **style, **thin)
        return
    if save.background_seconds > SYNCHRONOUS_SECONDS:
        note += f"written in the background in {1000 * save.background_seconds:.0f} ms"
        canvas.bar(DISK_ROW, DISK_HEIGHT, save.freed, save.committed, note, facecolor=WRITE, edgecolor=WRITE, **thin)
    note = f"{file_name(save)}: committed, durable"
    canvas.mark(
        DISK_ROW, save.committed, note, marker="D", markersize=5, color=COMMIT, markeredgecolor="white", zorder=5
    )


def draw_kill(canvas: Canvas, job: Job, number: int, caption: str) -> None:
    x = canvas.scale * (job.ended - canvas.zero)
    canvas.axes.vlines(x, 0.05, 1.42, color=KILL, linewidth=1.6, zorder=6)
    note = f"kill {number}: SIGKILL to all processes, aimed {job.aim}; {steps(len(job.lost))} to repeat"
    canvas.mark(1.42, job.ended, note, marker="X", markersize=11, color=KILL, markeredgecolor="white", zorder=7)
    offset = {"xytext": (7, 0), "textcoords": "offset points"}
    canvas.axes.annotate(caption, (x, DISK_ROW), **offset, color=KILL, fontsize=10.5, va="center")


def draw_run(canvas: Canvas, run: Run) -> None:
    """Draw all jobs of one run with their start-ups, kills and resumes."""
    kills = 0
    for position, job in enumerate(run.jobs):
        first = job.steps[0].start if job.steps else job.ended
        note = f"{'start' if position == 0 else 'restart'}: {first - job.launched:.1f} s until the first step"
        style = {"facecolor": STARTUP, "edgecolor": "#c3ccd6", "hatch": "....", "linewidth": 0.0}
        canvas.bar(TRAINING_ROW, TRAINING_HEIGHT, job.launched, first, note, zorder=1, **style)
        draw_job(canvas, job, zoomed=False)
        if position and job.steps:
            resumed = job.steps[0].number - 1
            canvas.mark(
                1.42, first, f"resumed from step {resumed}", marker=">", markersize=10, color=COMMIT,
                markeredgecolor="white", zorder=7,
            )  # fmt: skip
            canvas.axes.annotate(
                f"from step {resumed}", (canvas.scale * (first - canvas.zero), 1.42), (-9, 0), ha="right",
                textcoords="offset points", color=COMMIT, fontsize=9.5, va="center",
            )  # fmt: skip
        if job.killed:
            kills += 1
            draw_kill(canvas, job, kills, f"kill {kills}\n{steps(len(job.lost))} to repeat")


def style_axes(axes: Axes, rows: bool = True) -> None:
    axes.set_ylim(0, 1.62)
    axes.set_yticks([TRAINING_ROW, DISK_ROW] if rows else [], ["training", "disk"] if rows else [])
    axes.tick_params(axis="both", length=0, labelsize=10, labelcolor=MUTED)
    axes.grid(axis="x", color=GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c3ccd6")


def legend(figure: Figure) -> None:
    handles = [
        Patch(facecolor=STARTUP, edgecolor="#c3ccd6", hatch="....", label="start-up"),
        Patch(facecolor=STEP, label="training step"),
        Patch(facecolor=LOST, label="step lost by a kill"),
        Patch(facecolor=COLLECT, label="stall: state is collected"),
        Patch(facecolor=STALL, label="stall: plugin copies or writes it"),
        Patch(facecolor=WRITE, label="background write"),
        Patch(facecolor="white", edgecolor=KILL, hatch="//////", label="write cut off"),
        Line2D([], [], linestyle="none", marker="D", color=COMMIT, markeredgecolor="white", label="commit"),
        Line2D(
            [], [], linestyle="none", marker="X", color=KILL, markeredgecolor="white", markersize=11, label="SIGKILL"
        ),
        Line2D([], [], linestyle="none", marker=">", color=COMMIT, markersize=10, label="resume"),
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.046, 0.913), ncols=10, frameon=False, fontsize=9.5,
        labelcolor=INK, columnspacing=1.2, handletextpad=0.6, handlelength=1.5,
    )  # fmt: skip


def draw(alone: Run, killed: Run, stock: Run, *, exact: bool) -> tuple[Figure, Notes]:
    """Draw the three runs below each other and three close-ups.

    Args:
        alone: The uninterrupted run with asynchronous saves.
        killed: The killed and resumed run.
        stock: The run with Lightning's own checkpoints.
        exact: Whether the killed run ended with the bits of the uninterrupted one.

    Returns:
        The figure, and a sentence about every mark by its group id.
    """
    notes: Notes = {}
    figure = Figure(figsize=(17, 10.4), facecolor="white")
    matplotlib.rcParams["hatch.linewidth"] = 0.7
    verdict = "bit-exact: yes" if exact else "bit-exact: NO"
    figure.text(0.05, 0.955, "Killed, resumed, and the same bits", fontsize=21, weight="bold", color=INK)
    repeated = " and ".join(str(len(job.lost)) for job in killed.kills)
    subtitle = f"{verdict}   ·   {len(killed.kills)} kills, {repeated} steps repeated after them"
    figure.text(0.05, 0.926, subtitle, fontsize=13, color=COMMIT if exact else KILL)
    legend(figure)

    lanes = [
        ("uninterrupted, asynchronous saves", alone),
        ("killed and resumed, asynchronous saves", killed),
        ("uninterrupted, Lightning's own saves", stock),
    ]
    longest = max(run.seconds for _, run in lanes)
    grid = figure.add_gridspec(3, 1, left=0.05, right=0.985, top=0.845, bottom=0.405, hspace=0.5)
    for row, (title, run) in enumerate(lanes):
        axes = figure.add_subplot(grid[row])
        style_axes(axes)
        axes.set_xlim(-0.005 * longest, 1.01 * longest)
        axes.set_title(title, loc="left", fontsize=12, weight="bold", color=INK)
        axes.set_title(summary(run), loc="right", fontsize=10.5, color=MUTED)
        draw_run(Canvas(axes, run.start, 1.0, notes, f"lane{row}"), run)
        if row == len(lanes) - 1:
            axes.set_xlabel("seconds since the run was started", color=MUTED, fontsize=10)

    draw_close_ups(figure, alone, killed, stock, notes)
    return figure, notes


def summary(run: Run) -> str:
    committed = sum(save.committed is not None for save in run.saves)
    size = max(save.bytes for save in run.saves) / 1e6
    stall = 1000 * run.stall_seconds
    return (
        f"{committed} saves of {size:.0f} MB   ·   training held up for {stall:.0f} ms in all   ·   {run.seconds:.0f} s"
    )


def draw_close_ups(figure: Figure, alone: Run, killed: Run, stock: Run, notes: Notes) -> None:
    """Draw one save of each kind on the same scale, and the kill that hit a save."""
    stalls = [
        ("a typical save with AsyncCheckpointIO", alone, typical_stall(alone)),
        ("a typical save of Lightning's own", stock, typical_stall(stock)),
    ]
    longest = max(stall.durable - stall.start for _, _, stall in stalls)
    views = [(title, run, stall.start, longest + 0.15) for title, run, stall in stalls]
    hit = next((job for job in killed.kills if job.during_save), None)
    if hit is not None:
        views.append((f"kill {killed.kills.index(hit) + 1}, in the middle of a write", killed, hit.ended, 0.35))
    grid = figure.add_gridspec(1, 3, left=0.05, right=0.985, top=0.285, bottom=0.065, wspace=0.16)
    for column, (title, run, zero, after) in enumerate(views):
        axes = figure.add_subplot(grid[column])
        style_axes(axes)
        before = 0.35 if column == 2 else 0.15
        axes.set_xlim(-1000 * before, 1000 * after)
        axes.set_title(f"Close-up: {title}", loc="left", fontsize=12, weight="bold", color=INK)
        axes.set_xlabel(
            f"milliseconds since the {'kill' if column == 2 else 'end of the step'}", color=MUTED, fontsize=10
        )
        canvas = Canvas(axes, zero, 1000.0, notes, f"closeup{column}")
        for job in run.jobs:
            draw_job(canvas, job, zoomed=True)
        if column == 2 and hit is not None:
            draw_kill(canvas, hit, killed.kills.index(hit) + 1, "the half-written file\nnever becomes a checkpoint")
        else:
            describe_stall(axes, stalls[column][2])


def describe_stall(axes: Axes, stall: Stall) -> None:
    """Write into a close-up how long its save held up the training and how long it was written."""
    blocked = f"training stands still for {1000 * stall.seconds:.0f} ms"
    axes.text(0, TRAINING_ROW + TRAINING_HEIGHT / 2 + 0.05, blocked, fontsize=10.5, color=STALL, weight="bold")
    background = sum(save.background_seconds for save in stall.saves)
    written = f"written in {1000 * background:.0f} ms in the background"
    if background <= SYNCHRONOUS_SECONDS * len(stall.saves):
        written = "written while the training waits, and not synced to the disk"
    axes.text(0, DISK_ROW - DISK_HEIGHT / 2 - 0.05, written, fontsize=10.5, color=COMMIT, va="top")
