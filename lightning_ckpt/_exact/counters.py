"""Tracks the counters of Lightning's loops, the limits at which a fit ends, and gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_ckpt._private.loops import Internals

_Counts = dict[str, dict[str, int]]


def undo_unfinished(progress: dict[str, Any]) -> None:
    """Count what was begun and not completed as not begun, in place."""
    for value in progress.values():
        if isinstance(value, dict):
            undo_unfinished(value)
    if "completed" in progress:
        progress.update({name: progress["completed"] for name in ("ready", "started", "processed") if name in progress})


def epochs_begun(phase: str, done: int) -> int:
    """Return how many epochs have begun in a phase in which ``done`` are over."""
    return done if phase in ("between_epochs", "epoch_end") else done + 1


class Counters:
    """Our own counts of a fit's epochs, and of the batches of the present pass over the data.

    A callback that restores a checkpoint in mid-fit, or runs the loops itself, leaves Lightning's counters wrong:
    Lightning restores those of the save, and counts on from there. Our counts continue from where they were.
    ``run_inside`` is called with a function that runs the loops, if that happens while they run already.
    """

    def __init__(self, internals: Internals, run_inside: Callable[[Callable[[], Any]], Any]) -> None:
        self._internals = internals
        self._run_inside = run_inside
        self._off: _Counts = {"epoch": {}, "batch": {}}
        self._is_running = False
        internals.around_loops(self._load, self._run)

    def _load(self, load: Callable[[], None]) -> None:
        own = self.own()
        load()
        self.put(own)

    def _run(self, run: Callable[[], Any]) -> Any:
        if self._is_running:
            own = self.own()
            try:
                return self._run_inside(run)
            finally:
                self.put(own)
        self._is_running = True
        try:
            return run()
        finally:
            self._is_running = False

    def training_starts(self) -> None:
        """Take the present counters of the loops as right."""
        self._off = {"epoch": {}, "batch": {}}

    def resumed(self, phase: str) -> None:
        """Take over the counters of a checkpoint, which the loops have now; ``phase`` is what remains to be done."""
        own = self._internals.counts()
        done = own["epoch"]["processed"]
        begun = epochs_begun(phase, done)
        own["epoch"].update(ready=begun, started=begun, completed=done - (phase == "epoch_end"))
        self.put(own)

    def pass_begins(self, batches: int = 0) -> None:
        """Begin a pass over the data of which ``batches`` are done; called before the next batch is fetched."""
        ready = self._internals.counts()["batch"]["ready"]
        self._off["batch"] = dict.fromkeys(("ready", "started", "processed", "completed"), ready - batches)

    def own(self) -> _Counts:
        """Return our own counts: those of the loops, without what a callback has changed in them."""
        live = self._internals.counts()
        return {kind: {name: n - self._off[kind].get(name, 0) for name, n in live[kind].items()} for kind in live}

    def put(self, own: _Counts) -> None:
        """Set what :meth:`own` returns."""
        live = self._internals.counts()
        self._off = {kind: {name: n - own[kind][name] for name, n in live[kind].items()} for kind in live}

    def settle(self, progress: dict[str, Any], phase: str, *, redo: bool) -> None:
        """Adapt ``progress`` to a phase, in place, if a callback has changed the loops' counters.

        Two counters decide what the loops do. With ``redo``, the present batch does not count.
        """
        if not any(off for kind in self._off.values() for off in kind.values()):
            return
        epoch, batch, own = progress["epoch"]["current"], progress["batch"]["current"], self.own()["batch"]
        begun = epochs_begun(phase, epoch["processed"])
        # completed stays: it is the Trainer's current epoch, processed is how many it has trained
        epoch.update(ready=begun, started=begun)
        ready = self._internals.counts()["batch"]["ready"] - (redo and own["ready"] > own["completed"])
        batch.update(ready=ready, started=ready, processed=ready, completed=ready - (phase == "batch_end"))


class Accumulation:
    """Over how many batches one Trainer accumulates gradients: the user's setting wins, except in an open window."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._asked = int(trainer.accumulate_grad_batches)
        self._next: int | None = None

    def training_starts(self) -> None:
        """Note the Trainer's present value as the one that the user asked for; schedules change it later."""
        self._asked = int(self._trainer.accumulate_grad_batches)

    def capture(self) -> dict[str, Any]:
        """Return the value that the user asked for, and whether a schedule sets the present one."""
        waits = self._next is not None
        return {
            "asked": int(self._trainer.accumulate_grad_batches) if waits else self._asked,
            "scheduled": self._schedule() is not None,
        }

    def resume(self, saved: Mapping[str, Any], *, in_epoch: bool) -> str | None:
        """Continue with the saved value while a window is open, then with what the user asks for now.

        ``in_epoch`` is whether an epoch continues, instead of the next one beginning. Returns the change in words.
        """
        before, now = int(saved["accumulate_grad_batches"]), self._wanted(saved)
        self._trainer.accumulate_grad_batches = before if in_epoch else now
        if before == now:
            return None
        self._next = now if in_epoch else None
        return f"accumulate_grad_batches was {before} and is {now} now"

    def _wanted(self, saved: Mapping[str, Any]) -> int:
        schedule = self._schedule()
        if schedule is not None:
            return int(schedule.get_accumulate_grad_batches(self._trainer.current_epoch))
        before, origin = int(saved["accumulate_grad_batches"]), saved.get("accumulation")
        if origin is not None and not origin["scheduled"] and before != origin["asked"] == self._asked:
            return before  # a hook of the user's had changed it
        return self._asked

    def window_closed(self) -> None:
        """Switch to the user's value; called before a batch is fetched while no gradients are accumulated."""
        if self._next is not None:
            self._trainer.accumulate_grad_batches, self._next = self._next, None

    def _schedule(self) -> Any:
        return next((cb for cb in self._trainer.callbacks if hasattr(cb, "get_accumulate_grad_batches")), None)


class Limits:
    """When one fit ends: limits that hooks have changed, and a stop that waits for ``min_epochs`` or ``min_steps``.

    If the Trainer's argument differs from that of the run that saved, the argument wins.
    """

    def __init__(self, internals: Internals) -> None:
        self._internals = internals
        self._asked = internals.limits()

    def fit_started(self) -> None:
        """Note the Trainer's present limits as those that the user asked for."""
        self._asked = self._internals.limits()

    def capture(self) -> dict[str, Any]:
        """Return the limits, those asked for, and whether a stop waits for ``min_epochs`` or ``min_steps``."""
        waits = self._internals.trainer.should_stop and not self._internals.can_stop
        return {"asked": self._asked, "now": self._internals.limits(), "waits": bool(waits)}

    def resume(self, saved: Mapping[str, Any]) -> str | None:
        """Set the limits that hooks had changed; return what was set, in words."""
        names = [name for name, asked in saved["asked"].items() if saved["now"][name] != asked == self._asked[name]]
        changed = {name: saved["now"][name] for name in names}
        self._internals.set_limits(changed)
        return " and ".join(f"{name}={value}" for name, value in changed.items()) or None
