"""Interrupts runs that need no person: signals and kills to one, some or all ranks at random steps, and restarts.

Each start is the same: ranks under ``resume="auto"`` with ``preempt`` on. The job's parent does what ``torchrun`` does:
when a rank ends otherwise than well, the others get SIGTERM, and SIGKILL when their grace is over. Judged is that
nothing hangs, that the bits at the end are those of a run that was never interrupted, and how many steps were lost.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

__all__ = ["FRAMEWORKS", "campaign"]

FRAMEWORKS = ("lightning", "accelerate")
RANKS, STEPS, SAVE_EVERY = 2, 60, 10
BATCHES = 10  # in an epoch, on each rank
GRACE_SECONDS = 30.0  # torchrun's
HANG_SECONDS = 120.0
_TERM, _KILL = "SIGTERM", "SIGKILL"


# ---- the training, on each rank
# ----------------------------------------------------------------------------------------------------------------------


def _data() -> Any:
    import torch

    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(40, 8, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2, shuffle=True)


def _note(directory: Path, rank: int, step: int) -> None:
    with (directory / f"steps.{rank}").open("a") as file:
        print(step, file=file)
    time.sleep(0.02)


def _end(directory: Path, rank: int, weights: Any) -> None:
    (directory / f"end.{rank}").write_text(json.dumps([value.tolist() for value in weights]))


def _train_lightning(directory: Path, rank: int) -> None:
    import lightning.pytorch as pl
    import torch

    from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))

        def training_step(self, batch: Any, index: int) -> Any:
            _note(directory, self.global_rank, self.current_epoch * BATCHES + index)
            return self.layers(batch[0]).pow(2).mean()

        def validation_step(self, batch: Any, index: int) -> None:
            time.sleep(0.02)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

        def train_dataloader(self) -> Any:
            return _data()

        val_dataloader = train_dataloader

    pl.seed_everything(1, verbose=False)
    callback = ResumableCheckpoint(
        directory / "saved", every_n_train_steps=SAVE_EVERY, save_top_k=2, monitor="step", mode="max", resume="auto"
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_steps=STEPS, max_epochs=-1, callbacks=[callback],
        plugins=[AsyncCheckpointIO()], logger=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=2, val_check_interval=5, accumulate_grad_batches=2, default_root_dir=directory,
    )  # fmt: skip
    model = Model()
    trainer.fit(model)
    _end(directory, trainer.global_rank, model.parameters())


def _train_accelerate(directory: Path, rank: int) -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    from accelerate_ckpt import attach

    set_seed(1)
    project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=3)
    accelerator = attach(Accelerator(cpu=True, project_config=project), resume="auto", preempt=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    model, optimizer, data = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01), _data())
    accelerator.load_state()
    step = accelerator.resumed.step if accelerator.resumed else 0
    while step < STEPS:
        for batch in data:
            _note(directory, accelerator.process_index, step)
            accelerator.backward(model(batch[0]).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                accelerator.save_state()
            if step == STEPS:
                break
    accelerator.end_training()
    _end(directory, accelerator.process_index, accelerator.unwrap_model(model).parameters())


def train(framework: str, directory: Path, rank: int) -> None:
    """Train until the end, from where checkpoints say."""
    import torch

    torch.set_num_threads(1)
    (directory / f"pid.{rank}").write_text(str(os.getpid()))
    {"lightning": _train_lightning, "accelerate": _train_accelerate}[framework](directory, rank)


# ---- jobs
# ----------------------------------------------------------------------------------------------------------------------


class ForkedJob:
    """Ranks that are forked from this process, which has imported what takes long to import."""

    def __init__(self, framework: str, directory: Path) -> None:
        port = free_port()
        self.pids = [self._fork(framework, directory, rank, port) for rank in range(RANKS)]
        self._left = set(self.pids)
        self._deadline: float | None = None
        self.killed = False  # whether a rank had to be killed when its grace was over
        self.statuses: list[int] = []

    def _fork(self, framework: str, directory: Path, rank: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        log = os.open(directory / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", ACCELERATE_USE_CPU="true")
        status = 1
        faulthandler.register(signal.SIGUSR2, all_threads=True)  # where a rank hangs goes to its log
        try:
            train(framework, directory, rank)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:  # noqa: BLE001 - shown in the log
            traceback.print_exc()
        finally:
            import atexit

            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
            os._exit(status)

    def is_over(self) -> bool:
        for pid in list(self._left):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._left.discard(pid)
                self.statuses.append(os.waitstatus_to_exitcode(status))
                if self.statuses[-1] and self._deadline is None:
                    self._deadline = time.monotonic() + GRACE_SECONDS
                    self.send(signal.SIGTERM, self._left)
        if self._left and self._deadline is not None and time.monotonic() > self._deadline:
            self.killed = True
            self.send(signal.SIGKILL, self._left)
        return not self._left

    def send(self, number: int, pids: Any) -> None:
        for pid in list(pids):
            if pid in self._left:
                os.kill(pid, number)

    def close(self) -> None:
        self.send(signal.SIGKILL, self._left)


class LaunchedJob(ForkedJob):
    """The same under a real launcher: ``torchrun``, or Lightning's own, which starts the other ranks itself."""

    def __init__(self, framework: str, directory: Path, launcher: str) -> None:
        module = [sys.executable, "-m"]
        if launcher == "torchrun":
            module += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m"]
        for rank in range(RANKS):
            (directory / f"pid.{rank}").unlink(missing_ok=True)
        self._directory = directory
        with (directory / "log.job").open("a") as log:
            self._process = subprocess.Popen(
                [*module, "tests.chaos.unattended", framework, str(directory)],
                stdout=log, stderr=log, start_new_session=True, env={**os.environ, "ACCELERATE_USE_CPU": "true"},
            )  # fmt: skip
        self.killed, self.statuses = False, []

    @property
    def pids(self) -> list[int]:
        return [int((self._directory / f"pid.{rank}").read_text()) for rank in range(RANKS)]

    @pids.setter
    def pids(self, _: Any) -> None: ...

    def is_over(self) -> bool:
        status = self._process.poll()
        self.statuses = [] if status is None else [status]
        return status is not None

    def send(self, number: int, pids: Any) -> None:
        for pid in [self._process.pid] if number == signal.SIGTERM and random.random() < 0.5 else pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _started(framework: str, directory: Path, launcher: str) -> ForkedJob:
    return ForkedJob(framework, directory) if launcher == "fork" else LaunchedJob(framework, directory, launcher)


# ---- the campaign
# ----------------------------------------------------------------------------------------------------------------------


def _steps(directory: Path) -> list[int]:
    path = directory / "steps.0"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def _has_ended(directory: Path) -> bool:
    return all((directory / f"end.{rank}").exists() for rank in range(RANKS))


def _wait(job: ForkedJob, condition: Any) -> bool:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _close_hanging(job: ForkedJob) -> None:
    if isinstance(job, LaunchedJob):
        job.close()
        return
    job.send(signal.SIGUSR2, job.pids)
    time.sleep(1.0)
    job.close()


def _whole(framework: str, directory: Path, launcher: str) -> str:
    directory.mkdir(parents=True)
    job = _started(framework, directory, launcher)
    is_over = _wait(job, job.is_over)
    job.close()
    if not is_over or not _has_ended(directory):
        raise RuntimeError(f"the run without interruptions {'failed' if is_over else 'hangs'}: look at {directory}")
    return (directory / "end.0").read_text()


def campaign(framework: str, directory: Path, interruptions: int, *, seed: int = 1, launcher: str = "fork") -> Any:
    """Interrupt runs so many times; return what came of it.

    Args:
        framework: ``"lightning"`` or ``"accelerate"``.
        directory: For all files; must not exist.
        interruptions: How many.
        seed: Of what is done, and when.
        launcher: ``"fork"``, ``"torchrun"``, or ``"own"``, Lightning's.

    Returns:
        A dictionary: runs, hangs, runs with other bits, and by kind of interruption the batches that were lost.
    """
    for module in ["torch", framework, f"{framework}_ckpt"] if launcher == "fork" else []:
        __import__(module)
    chance = random.Random(seed)
    expected = _whole(framework, directory / "whole", launcher)
    found: dict[str, Any] = {"interruptions": 0, "runs": 0, "hangs": [], "different": [], "killed_after_grace": 0}
    lost: dict[str, list[int]] = collections.defaultdict(list)
    statuses: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    while found["interruptions"] < interruptions:
        run = directory / f"run{found['runs']}"
        run.mkdir()
        found["runs"] += 1
        before: tuple[str, int] | None = None
        while not _has_ended(run):
            seen = len(_steps(run))
            at = seen + chance.randint(1, STEPS // 3)
            job = _started(framework, run, launcher)
            is_there = _wait(job, lambda job=job, run=run, at=at: job.is_over() or len(_steps(run)) >= at)
            steps = _steps(run)
            if before is not None and len(steps) > seen:
                kind, last = before
                lost[kind].append(last + 1 - steps[seen])
                before = None
            if not is_there:
                found["hangs"].append(f"{run}: no progress")
                _close_hanging(job)
                break
            if job.is_over():
                continue
            number = chance.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGKILL])
            targets = chance.choice([[0], [1], [0, 1]])
            kind = f"{number.name} to {'all ranks' if len(targets) == 2 else f'rank {targets[0]}'}"
            job.send(number, [job.pids[rank] for rank in targets])
            found["interruptions"] += 1
            if not _wait(job, job.is_over):
                found["hangs"].append(f"{run}: {kind} at step {steps[-1]}")
                _close_hanging(job)
                break
            found["killed_after_grace"] += number == signal.SIGTERM and job.killed
            statuses[kind][str(sorted(job.statuses))] += 1
            job.close() if launcher != "fork" else None
            before = (kind, _steps(run)[-1])
        if _has_ended(run) and any((run / f"end.{rank}").read_text() != expected for rank in range(RANKS)):
            found["different"].append(str(run))
    return {**found, "lost_batches": dict(lost), "statuses": {kind: dict(each) for kind, each in statuses.items()}}


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))
