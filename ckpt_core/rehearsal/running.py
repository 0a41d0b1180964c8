"""Run a user's script once uninterrupted and once resumed from each save, and compare the runs."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ckpt_core.errors import CheckpointError
from ckpt_core.rehearsal.comparing import HINTS, SUBJECTS, TOLD, Difference, compare, hints
from ckpt_core.rehearsal.plan import POINTS, Plan
from ckpt_core.rehearsal.result import Result, Resumed
from ckpt_core.rehearsal.samples import judge

_RANK = re.compile(r"rank-(\d+)\.json$")
_TAIL_LINES = 25
_GRACE_SECONDS = 10
# Code of a process that ends the script like `_end` does, when the rehearsing process has died, even of SIGKILL.
_GUARD = """
import os, signal, sys, time
told = sys.stdin.read().split()
if told and told[-1] != "over":
    try:
        os.kill(int(told[0]), signal.SIGTERM)
        for _ in range(int(sys.argv[1]) * 10):
            os.kill(int(told[0]), 0)
            time.sleep(0.1)
    finally:
        os.killpg(int(told[0]), signal.SIGKILL)
"""
#: Points at which all batches handed out have been trained on; an open accumulation window would be begun again.
_SHARED = ("middle", "epoch-end", "step", "save_state")


class CannotRehearseError(CheckpointError):
    """The script cannot be rehearsed: it fails without being interrupted, or trains without our plugins."""


def rehearse(
    command: Sequence[str],
    *,
    at: Sequence[int] = (),
    points: Sequence[str] | None = None,
    steps: int | None = None,
    resume_arguments: Sequence[str] = (),
    ranks: Sequence[int] = (),
    ignore: Collection[str] = (),
    directory: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    by_script: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> Result:
    """Train with a command, resume it in fresh processes, and compare the runs.

    Args:
        command: The words of the command that starts the training; the script uses one of our plugins. ``{dir}`` in a
            word is replaced by a directory for files that the script itself writes.
        at: Optimizer steps after which to save.
        points: Other points at which to save, of :data:`ckpt_core.rehearsal.POINTS`; None: all of them, unless ``at``
            is given.
        steps: How many optimizer steps to train; None: a little more than two epochs if that is short, else 30.
        resume_arguments: Additional arguments of a resumed run, which make the script resume; ``{checkpoint}`` is
            replaced by the path, ``{ranks}`` by the number of ranks.
        ranks: Other numbers of ranks that also resume, from ``at`` and from the middle and the end of an epoch, and
            train to its end, to check whether each sample is handed out once.
        ignore: Patterns of ``subject:key`` that may differ, such as ``"attributes:Model.seen"``.
        directory: A directory for checkpoints, notes and output of all processes, which stays; None: a temporary one.
        env: Environment variables in addition to those of this process.
        cwd: Working directory of the processes.
        timeout: Seconds that one process may take.
        by_script: Whether an option of a training in the script requests this, so that only that training is rehearsed.
        announce: Called with a line to be shown before each process starts.

    Returns:
        The comparison of all resumes with the uninterrupted run.

    Raises:
        CannotRehearseError: The script fails without being interrupted, takes longer than ``timeout``, does not train
            with one of our plugins, or nothing was saved.
        ValueError: A point, step or number of ranks is not valid.
    """
    names = tuple(points) if points is not None else () if at else POINTS
    unknown = [name for name in names if name not in POINTS]
    if unknown:
        raise ValueError(f"there is no point {unknown[0]!r}; the points are {', '.join(POINTS)}")
    if any(step < 1 for step in at) or (steps is not None and steps <= max(at, default=0)):
        raise ValueError("steps to save after are at least 1, and fewer than those that are trained")
    if any(number < 1 for number in ranks):
        raise ValueError(f"ranks must be numbers of at least 1, not {list(ranks)}")
    if steps is None and at:
        steps = max(at) + 10
    with contextlib.ExitStack() as stack:
        root = os.fspath(directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-rehearsal-")))
        runs = _Runs(list(command), os.path.abspath(root), list(resume_arguments), env, cwd, timeout, by_script)
        announce("training without interruption")
        whole = runs.start("uninterrupted", at=tuple(at), points=names, only_points=points is not None, steps=steps)
        return _Comparison(runs, whole, ignore, announce).result(ranks)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The output of one run: its notes by rank, and a message if it has failed."""

    ranks: Mapping[int, Mapping[str, Any]]
    failure: str | None

    @property
    def first(self) -> Mapping[str, Any]:
        return self.ranks[min(self.ranks)]


@dataclasses.dataclass
class _Runs:
    """Starts the processes of one rehearsal."""

    command: list[str]
    root: str
    resume_arguments: list[str]
    env: Mapping[str, str] | None
    cwd: str | os.PathLike[str] | None
    timeout: float | None
    by_script: bool
    ranks: int = 1  # number of ranks of the uninterrupted run

    def start(self, name: str, *, resume: str | None = None, until: int | None = None, **planned: Any) -> _Run:
        directory = os.path.join(self.root, name)
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(os.path.join(directory, "files"))
        checkpoints, saves = os.path.join(self.root, "checkpoints"), os.path.join(self.root, "saves")
        told = {**planned, "by_script": self.by_script}
        plan = Plan(directory, checkpoints, saves, resume=resume, until=until, **told)
        words = list(self.command)
        if resume is not None:
            number = str(plan.ranks or self.ranks)
            words += [w.replace("{checkpoint}", resume).replace("{ranks}", number) for w in self.resume_arguments]
        if plan.ranks is not None:
            words = _with_ranks(words, plan.ranks)
        words = [word.replace("{dir}", os.path.join(directory, "files")) for word in words]
        output = os.path.join(directory, "output.txt")
        status = self._run(words, output, plan)
        files = glob.glob(os.path.join(glob.escape(directory), "rank-*.json"))
        ranks = {int(_RANK.search(file)[1]): _read(file) for file in files}  # type: ignore[index]
        failure = None
        if not ranks or status:
            failure = f"{shlex.join(words)}: exit status {status}\n{_tail(output)}"
        return _Run(ranks, failure)

    def _run(self, words: list[str], output: str, plan: Plan) -> int:
        environment = {**os.environ, **(self.env or {}), **plan.variables()}
        with open(output, "wb") as file, _guard() as guard:
            try:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=self.cwd,
                    start_new_session=True,
                )
            except OSError as error:
                raise CannotRehearseError(f"{words[0]} cannot be started: {error}") from error
            try:
                guard(process.pid)
                return process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                raise CannotRehearseError(
                    f"{shlex.join(words)} has not ended within {self.timeout:g} s\n{_tail(output)}",
                    remedy="train fewer steps (--steps), or allow more time (--timeout)",
                ) from None
            finally:
                _end(process)


def _with_ranks(words: list[str], ranks: int) -> list[str]:
    """Return a command with its launcher's number of processes set, if it has a launcher that is known."""
    for place, word in enumerate(words):
        if os.path.basename(word) in ("torchrun", "torch.distributed.run"):
            names: tuple[str, ...] = ("--nproc-per-node", "--nproc_per_node")
        elif word == "accelerate.commands.launch" or "accelerate launch" in " ".join(words[place - 1 : place + 1]):
            names = ("--num_processes", "--num-processes", "-n")
        else:
            continue
        script = next((i for i, one in enumerate(words) if i > place and one.endswith(".py")), len(words))
        for given in range(place + 1, script):
            name, equals, _ = words[given].partition("=")
            if name in names:
                return [*words[:given], f"{names[0]}={ranks}", *words[given + (1 if equals else 2) :]]
        return [*words[: place + 1], f"{names[0]}={ranks}", *words[place + 1 :]]
    return words


@contextlib.contextmanager
def _guard() -> Iterator[Callable[[int], None]]:
    """Yield a function that makes the process with a given id end with this one, even if this one gets SIGKILL."""
    words = [sys.executable, "-I", "-S", "-c", _GUARD, str(_GRACE_SECONDS)]
    kept = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(words, stdin=subprocess.PIPE, **kept) as process:  # type: ignore[call-overload]

        def tell(text: str) -> None:
            with contextlib.suppress(BrokenPipeError):  # the guard process has been killed
                process.stdin.write(f"{text}\n".encode())
                process.stdin.flush()

        try:
            yield lambda pid: tell(str(pid))
        finally:
            tell("over")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group; SIGTERM comes first, so that a launcher can end its ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: str) -> Mapping[str, Any]:
    with open(file, encoding="utf-8") as opened:
        return json.load(opened)  # type: ignore[no-any-return]


def _tail(output: str) -> str:
    with open(output, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-_TAIL_LINES:]).rstrip()


class _Comparison:
    def __init__(self, runs: _Runs, whole: _Run, ignore: Collection[str], announce: Callable[[str], None]) -> None:
        if whole.failure is not None:
            raise CannotRehearseError(
                f"the script cannot be rehearsed: without any interruption it left nothing to compare\n{whole.failure}",
                remedy="it must run to its end without errors, and train with a Trainer that has "
                "ResumableCheckpoint, ResumableCallback or one of our CheckpointIOs, or with an Accelerator "
                "that accelerate_ckpt is attached to",
            )
        if not whole.first["saved"]:
            raise CannotRehearseError(
                "nothing was saved in the steps that were trained, so nothing can be resumed",
                remedy="train more steps (--steps), or say where to save (--at 3)",
            )
        self._runs, self._whole, self._ignore, self._announce = runs, whole, ignore, announce
        self._numbers = sorted(map(int, whole.first["steps"]))
        self._repeats: frozenset[str] | None = None
        runs.ranks = len(whole.ranks)

    def result(self, ranks: Sequence[int]) -> Result:
        saves = self._whole.first["saved"]
        resumes = [self._resume(saved) for saved in saves]
        failed = next((i for i, resumed in enumerate(resumes) if resumed[1].differences), None)
        if failed is not None:
            self._resume_again(saves[failed], resumes[failed][0])
            resumes = [(run, self._judge(saved, run)) for saved, (run, _) in zip(saves, resumes, strict=True)]
        others = [self._resume_by(n, i) for n in ranks for i, saved in enumerate(saves) if saved["point"] in _SHARED]
        steps = self._whole.first["steps"]
        noted = {subject for step in steps.values() for subject in step}
        return Result(
            tuple(self._runs.command),
            len(steps),
            tuple(subject for subject in SUBJECTS if subject in noted),
            (*(resumed for _, resumed in resumes), *others),
            tuple(self._whole.first["missed"]),
            self._repeats,
        )

    def _resume(self, saved: Mapping[str, Any]) -> tuple[_Run, Resumed]:
        self._announce(f"resuming from {saved['place']} ({saved['point']})")
        run = self._start(saved, f"resumed-{saved['point']}-{saved['number']}")
        return run, self._judge(saved, run)

    def _resume_by(self, ranks: int, index: int) -> Resumed:
        """Resume from a save with a different number of ranks, and check the samples of the epoch."""
        saved = self._whole.first["saved"][index]
        self._announce(f"resuming with {ranks} ranks from {saved['place']} ({saved['point']})")
        run = self._runs.start(f"{ranks}-ranks-{saved['point']}-{saved['number']}", resume=saved["path"], ranks=ranks)
        if run.failure is None and len(run.ranks) != ranks:
            raise CannotRehearseError(
                f"{ranks} ranks should have resumed, but {len(run.ranks)} did: the script or its launcher sets "
                "the number",
                remedy="start it with torchrun or accelerate launch, create our plugin or callback before the "
                "Trainer, or say how to pass the number to the script, such as --resume-with '--devices "
                "{ranks}'",
            )
        samples, problem = "-", None
        if run.failure is None:
            whole = [self._whole.ranks[rank] for rank in sorted(self._whole.ranks)]
            handed = [one["handed"] for one in whole]
            before = [one["saved"][index]["handed"] for one in whole]
            resumed = [run.ranks[rank]["handed"] for rank in sorted(run.ranks)]
            samples, problem = judge(handed, before, resumed, drops=any(one["drops"] for one in whole))
        return Resumed(
            point=saved["point"],
            place=saved["place"],
            steps=0,
            said=tuple(run.first["said"]) if run.ranks else (),
            failure=run.failure,
            ranks=ranks,
            samples=samples,
            problem=problem,
        )

    def _start(self, saved: Mapping[str, Any], name: str) -> _Run:
        return self._runs.start(name, resume=saved["path"], until=self._numbers[-1])

    def _resume_again(self, saved: Mapping[str, Any], run: _Run) -> None:
        self._announce("resuming once more, to see what differs in each process")
        again = self._start(saved, "resumed-again")
        if again.failure is None:
            found: set[str] = set()
            for rank in run.ranks.keys() & again.ranks.keys():
                one, other = run.ranks[rank]["steps"], again.ranks[rank]["steps"]
                for number in one.keys() & other.keys():
                    for subject, values in one[number].items():
                        if subject == HINTS:
                            continue
                        others = other[number].get(subject, {})
                        found |= {f"{subject}:{key}" for key in values if values[key] != others.get(key)}
            self._repeats = frozenset(found)

    def _judge(self, saved: Mapping[str, Any], run: _Run) -> Resumed:
        number = int(saved["number"])
        failure = run.failure
        if failure is None and not run.first["resumed"]:
            raise CannotRehearseError(
                "the script should have resumed, but started from the beginning: it did not call "
                "accelerator.load_state",
                remedy="say how to make it resume, such as --resume-with '--resume_from_checkpoint {checkpoint}'",
            )
        differences: list[Difference] = []
        for rank in sorted(run.ranks.keys() & self._whole.ranks.keys()):
            expected, found = self._whole.ranks[rank]["steps"], run.ranks[rank]["steps"]
            differences += compare(
                expected,
                found,
                after=number,
                rank=rank,
                ignore=self._ignore,
                but=self._harmless(),
                already=saved["already"],
            )
        order = list(SUBJECTS)
        differences.sort(key=lambda d: (d.number, order.index(d.subject), d.rank))
        first = differences[0] if differences else None
        explained: Mapping[str, tuple[str, str]] = {}
        if first is not None:
            explained = hints(self._whole.ranks[first.rank]["steps"], run.ranks[first.rank]["steps"], first.number)
        noted = run.first["steps"] if run.ranks else {}
        return Resumed(
            point=saved["point"],
            place=saved["place"],
            steps=sum(other > number and str(other) in noted for other in self._numbers),
            differences=tuple(differences),
            hints=explained,
            where=self._whole.first["where"],
            said=tuple(run.first["said"]) if run.ranks else (),
            failure=failure,
        )

    def _harmless(self) -> set[str]:
        """Return keys that differ in each process, such as times, if all of them are of the subjects in ``TOLD``."""
        repeats = self._repeats or frozenset()
        return set(repeats) if all(name.partition(":")[0] in TOLD for name in repeats) else set()
