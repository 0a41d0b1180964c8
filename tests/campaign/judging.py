"""Trains in forked processes, uninterrupted and resumed, and judges each resume from outside.

A resume is exact if weights, states of optimizers, batches and logged rows are those of the uninterrupted run, bit for
bit. A resume that is not exact must be warned about. The directory of a training that died is a copy of what the
uninterrupted run had on the disk at that moment, which is what SIGKILL leaves of a run that saves synchronously; some
trainings are also killed with a real SIGKILL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Verdicts that must not occur.
BAD = ("SILENT", "FALSE ALARM", "CRASHED", "WRONGLY EQUAL")
NEVER_RAN = "uninterrupted:"  # begins a problem of the uninterrupted run, not of a resume
#: A line that is printed if only the script can know whether it matters.
_ANNOUNCED = "does not repeat what it does after an epoch"
_OURS = re.compile(r"this resume (is|cannot|begins)|a resume will not have it")


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a run saves the checkpoint that it is resumed from, and where it dies.

    Attributes:
        name: Name of the checkpoint.
        saves: Epoch and batch after which it saves; a negative batch is the end of the epoch, None in its validation.
        dies: Epoch and batch before which the run dies.
        really: Whether it dies by SIGKILL.
        leaves_records: Whether the flight recorder's file survives.
    """

    name: str
    saves: tuple[int, int | None]
    dies: tuple[int, int]
    really: bool = False
    leaves_records: bool = True


@dataclasses.dataclass
class Outcome:
    """What one process did.

    Attributes:
        seen: Every batch: place and digest.
        rows: Every logged row.
        weights: Digest of the weights at the end.
        optimizers: Digest of the states of all optimizers at the end.
        step: Optimizer steps at the end.
        warned: All warnings.
        attributes: Digests of attributes of module and callbacks, by the names of their classes, before the first batch
            after each checkpoint, and after the beginning.
        marks: How many batches, rows and warnings there were at each checkpoint, and how many warnings after it.
        compared: What the recorder found: message, what differs.
        refused: The message of a ``CheckpointError``.
        crashed: The traceback of another exception.
    """

    seen: list[Any] = dataclasses.field(default_factory=list)
    rows: list[Any] = dataclasses.field(default_factory=list)
    weights: str = ""
    optimizers: str = ""
    step: int = 0
    warned: list[str] = dataclasses.field(default_factory=list)
    attributes: dict[str, dict[str, dict[str, str]]] = dataclasses.field(default_factory=dict)
    marks: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    compared: list[Any] = dataclasses.field(default_factory=list)
    refused: str = ""
    crashed: str = ""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Outcome:
        return cls(**json.loads(path.read_text()))


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The judgement of one resume.

    Attributes:
        verdict: ``exact``, ``said`` (warned about), ``refused``, or one of :data:`BAD`.
        wrong: What differed from the uninterrupted run.
        recorder: What the recorder reported.
        differs: What differed according to the recorder.
        warned: The other warnings.
        problem: The traceback of a crash.
    """

    verdict: str
    wrong: tuple[str, ...] = ()
    recorder: str = ""
    differs: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    problem: str = ""

    @property
    def words(self) -> str:
        """The verdict and its reasons, in one line."""
        told = "; ".join(text[:160] for text in [self.recorder, *self.warned] if text)
        wrong = f"[{', '.join(self.wrong)}] " if self.wrong else ""
        return f"{self.verdict}: {wrong}{told or self.problem[-600:]}"


def compare(base: Outcome, resumed: Outcome, point: str) -> Judgement:
    """Judge a resume by what the uninterrupted run did after the same checkpoint."""
    recorder = "; ".join(message for message, _ in resumed.compared)
    differs = tuple(name for _, names in resumed.compared for name in names)
    warned = [text for text in resumed.warned if text and "repeats one of the interrupted run" not in text]
    if resumed.refused:
        return Judgement("refused", warned=(resumed.refused,))
    if resumed.crashed:
        verdict = "said" if warned or differs else "CRASHED"
        return Judgement(verdict, ("crashes",), recorder, differs, tuple(warned), resumed.crashed)
    batches, rows, before, after = base.marks[point]
    early = [text for text in base.warned[:after] if "a resume will not have it" in text]
    expected = {
        "batches": base.seen[batches:],
        "rows": base.rows[rows:],
        "weights": base.weights,
        "optimizers": base.optimizers,
        "steps": base.step,
    }
    found = {
        "batches": resumed.seen,
        "rows": resumed.rows,
        "weights": resumed.weights,
        "optimizers": resumed.optimizers,
        "steps": resumed.step,
    }
    wrong = tuple(name for name in expected if expected[name] != found[name])
    if wrong:
        warned += [text for text in early if text not in warned]
        verdict = "said" if differs or warned else ("WRONGLY EQUAL" if recorder else "SILENT")
    else:
        attributes = base.attributes.get(point, {}), resumed.attributes.get("begun", {})
        for found_there, run in zip(attributes, (base, resumed), strict=True):
            found_there.update(run.attributes.get("end", {}))
        warned += [text for text in base.warned[before:after] if text in early]  # about this very checkpoint
        idle = [text for text in warned if not _is_true(text, *attributes)]
        verdict = "FALSE ALARM" if differs or idle else "exact"
    return Judgement(verdict, wrong, recorder, differs, tuple(warned))


def _is_true(text: str, base: Mapping[str, Any], resumed: Mapping[str, Any]) -> bool:
    """Return whether what a warning calls lost has indeed another value, even if no result differs."""
    if "variables of the script" in text:
        there, here = base.get("variables", {}), resumed.get("variables", {})
        named = {path.partition(".")[0] for path in re.findall(r"`([^`]+)` of ", text)}
        both = there.keys() & here.keys()
        told = {key for key in both if key.partition(",")[0] in named} or both  # a global is in no function
        owned = [(kind, path.partition(".")[0]) for path, kind in re.findall(r"`([^`]+)` of (\w+)", text)]
        is_other = [base[kind].get(name) != resumed.get(kind, {}).get(name) for kind, name in owned if kind in base]
        return base.get("modules") != resumed.get("modules") or any([*is_other, *(there[k] != here[k] for k in told)])
    found = re.match(r"\w+ `(\w+)` changed (.*) since the start", text)
    if found is None:
        return False
    mine, theirs = resumed.get(found[1], {}), base.get(found[1], {})
    names = {name.partition(".")[0] for name in re.findall(r"`([^`]+)`", found[2])}
    return any(mine.get(name) != theirs.get(name) for name in names)


def said_of(caught: Sequence[Any]) -> list[str]:
    """Return the texts of warnings, empty for those that are not about exactness."""
    return [text if _OURS.search(text) else "" for text in (str(w.message) for w in caught)]


def events_of(path: Path) -> list[Any]:
    """Return the recorder's comparisons in an event log: message, what differs."""
    if not path.exists():
        return []
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [[event["message"], event["differs"]] for event in events if event["event"] == "ResumeCompared"]


def sha(value: Any) -> str:
    """Return a digest of anything that a batch, a state or an attribute is made of."""
    digest = hashlib.sha256()

    def add(item: Any, depth: int) -> None:
        if depth == 0:
            digest.update(b"deep")
        elif isinstance(item, dict):
            for key in sorted(item, key=repr):
                digest.update(repr(key).encode())
                add(item[key], depth - 1)
        elif isinstance(item, (list, tuple)):
            for part in item:
                add(part, depth - 1)
        elif hasattr(item, "full_tensor"):
            add(item.full_tensor(), depth - 1)
        elif torch.is_tensor(item):
            words = item.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(str(item.dtype).encode() + words.numpy().tobytes())
        elif isinstance(item, np.ndarray):
            digest.update(item.tobytes())
        elif hasattr(type(item), "state_dict") and not isinstance(item, torch.utils.data.DataLoader):
            add(item.state_dict(), depth - 1)
        elif isinstance(item, (int, float, str, bytes, bool, type(None))):
            digest.update(repr(item).encode())
        else:
            digest.update(type(item).__name__.encode())
            if type(item).__module__.startswith("tests."):
                add(dataclasses.asdict(item) if dataclasses.is_dataclass(item) else vars(item), depth - 1)

    add(value, 8)
    return digest.hexdigest()[:16]


def attributes_of(owners: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Return digests of the attributes of objects, by the names of their classes."""
    return {type(owner).__name__: {name: sha(value) for name, value in vars(owner).items()} for owner in owners}


def in_a_fork(work: Callable[[], None], log: Path) -> int:
    """Run ``work`` in a forked process; return its exit status, or the signal that killed it, negative."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            signal.alarm(120)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - this process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the loader's workers of a process that was killed
    return status


def judge_points(
    train: Callable[[str, Path, Point | None], None], points: Sequence[Point], directory: Path
) -> dict[str, Judgement]:
    """Train without interruption, and resume from each point.

    Args:
        train: Called in a process of its own with ``base``, ``killed`` or ``resumed``, its directory, and the point.
            Writes ``outcome.json`` there; ``base`` also leaves a directory for each point.
        points: Where to save and die.
        directory: An empty directory.
    """
    found: dict[str, Judgement] = {}
    base = directory / "base"
    base.mkdir(parents=True)
    status = in_a_fork(functools.partial(train, "base", base, None), directory / "base.log")
    if status:
        problem = (directory / "base.log").read_text()[-3000:]
        return {point.name: Judgement("CRASHED", problem=f"{NEVER_RAN} {status}\n{problem}") for point in points}
    uninterrupted = Outcome.read(base / "outcome.json")
    for point in points:
        mine = directory / point.name
        log = directory / f"{point.name}.log"
        if point.really:
            mine.mkdir()
            status = in_a_fork(functools.partial(train, "killed", mine, point), log)
            if status == 0:
                continue  # the training ended before the kill
            if status != -signal.SIGKILL:
                found[point.name] = Judgement("CRASHED", problem=f"killed: {status}\n{log.read_text()[-3000:]}")
                continue
        elif not mine.exists():
            continue  # there is no such place in this training
        status = in_a_fork(functools.partial(train, "resumed", mine, point), log)
        if status:
            found[point.name] = Judgement("CRASHED", problem=f"resumed: {status}\n{log.read_text()[-3000:]}")
        else:
            judgement = compare(uninterrupted, Outcome.read(mine / "outcome.json"), point.name)
            if judgement.verdict in ("SILENT", "WRONGLY EQUAL") and _ANNOUNCED in log.read_text():
                judgement = dataclasses.replace(judgement, verdict="said", warned=(_ANNOUNCED,))
            found[point.name] = judgement
    return found


def scratch() -> Path:
    """Return a new directory, in memory if there is room."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="campaign-", dir=place))
