"""Interrupts unattended runs: signals and kills to one, some or all ranks at any moment, and restarts.

Each start is the same: ranks with ``resume="auto"`` and with ``preempt`` on. The job's parent does what ``torchrun``
does: when a rank fails, the others get SIGTERM, and SIGKILL when their grace period is over. The campaign checks that
nothing hangs and that the final bits are those of a run that was never interrupted, and counts the lost batches.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

# What each training imports, imported before a rank is forked: all ranks run the same code even while it is edited, and
# none seems to hang because, on a busy machine, it imports what the first optimizer needs.
FRAMEWORKS = {
    "lightning": ("torch._dynamo", "lightning.pytorch", "lightning_ckpt.resumable", "lightning_ckpt.io"),
    "accelerate": ("torch._dynamo", "accelerate", "accelerate_ckpt._attach"),
    "transformers": ("torch._dynamo", "transformers.trainer", "accelerate_ckpt.integrations.transformers"),
}
STEPS, SAVE_EVERY = 60, 10
BATCHES = 12  # in an epoch, on each rank
GRACE_SECONDS = 30.0  # torchrun's
HANG_SECONDS = 300.0  # without a note of any rank
SIGNALS = ("SIGTERM", "SIGUSR1")
_JUST_IN_TIME = "just-in-time"  # a file in the directory of a run in which survivors save
_SHARDS = "shards"  # a file there: the number of shards of the model
#: When an interruption comes: at rank 0's n-th note of this kind since the start; "start": at any time after the start.
MOMENTS = ("start", "resume", "step", "window", "validation", "epoch", "save")


# ---- the training, on each rank
# ----------------------------------------------------------------------------------------------------------------------


def _data(ranks: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(BATCHES * 2 * ranks, 8, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2, shuffle=True)


class _Notes:
    """Writes down what a rank does, for the campaign: a line for each moment."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / f"notes.{rank}"
        fsync = os.fsync

        def slowly(descriptor: int) -> None:
            self("save")
            time.sleep(0.03)  # a slow disk, so that interruptions come during saves
            fsync(descriptor)

        os.fsync = slowly

    def __call__(self, moment: str, value: int = 0) -> None:
        with self._path.open("a") as file:
            file.write(f"{moment} {value}\n")

    def step(self, step: int) -> None:
        """Note that a step begins, and whether it is one within an accumulation window."""
        self("window" if step % 2 else "step", step)
        time.sleep(0.02)


def _saves_just_in_time(directory: Path, rank: int) -> bool:
    import torch

    found = (directory / _JUST_IN_TIME).exists()
    if found:  # each rank has generators of its own, so that no other rank has the state of a dead one
        torch.manual_seed(rank)
    return found


def _end(directory: Path, rank: int, weights: Any) -> None:
    (directory / f"end.{rank}").write_text(json.dumps([value.tolist() for value in weights]))


def _network() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))


def _train_lightning(directory: Path, rank: int, ranks: int, note: _Notes) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _network()

        def configure_model(self) -> None:
            for layer in (self.layers[0], self.layers[2]) if shards > 1 else ():
                fully_shard(layer, mesh=self.device_mesh)

        def on_fit_start(self) -> None:
            _saves_just_in_time(directory, rank)  # the strategy has given all ranks the same generators

        def training_step(self, batch: Any, index: int) -> Any:
            note.step(self.current_epoch * BATCHES + index)
            return self.layers(batch[0]).pow(2).mean()

        def setup(self, stage: str) -> None:
            note("resume")

        def validation_step(self, batch: Any, index: int) -> None:
            note("validation")  # the sanity check, too
            time.sleep(0.05)

        def on_train_epoch_end(self) -> None:
            note("epoch")

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

        def train_dataloader(self) -> Any:
            return _data(ranks)

        val_dataloader = train_dataloader

    pl.seed_everything(1, verbose=False)
    model = Model()
    shards = int((directory / _SHARDS).read_text())
    strategy: Any = "ddp" if shards == 1 else ModelParallelStrategy(ranks // shards, shards)
    plugins: list[Any] = [AsyncCheckpointIO() if shards == 1 else ShardedCheckpointIO()]
    if "ray.train" in sys.modules:
        strategy, environment = _lightning_under_ray()
        plugins += environment
    callback = ResumableCheckpoint(
        directory / "saved", every_n_train_steps=SAVE_EVERY // 2, save_top_k=2, monitor="step", mode="max",
        resume="auto", preempt=",".join(SIGNALS), just_in_time=_saves_just_in_time(directory, rank),
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_steps=STEPS // 2, max_epochs=-1, callbacks=[callback],
        plugins=plugins, logger=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=4, val_check_interval=6, accumulate_grad_batches=2, default_root_dir=directory,
    )  # fmt: skip
    trainer.fit(model)
    weights = (value.full_tensor() if isinstance(value, DTensor) else value for value in model.parameters())
    _end(directory, trainer.global_rank, weights)


def _lightning_under_ray() -> tuple[Any, list[Any]]:
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

    return RayDDPStrategy(), [RayLightningEnvironment()]


def _train_accelerate(directory: Path, rank: int, ranks: int, note: _Notes) -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    from accelerate_ckpt import attach

    set_seed(1)
    project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=3)
    accelerator = attach(
        Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=2),
        resume="auto", preempt=",".join(SIGNALS), just_in_time=_saves_just_in_time(directory, rank),
    )  # fmt: skip
    model = _network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)  # steps once per epoch, and so is not prepared
    accelerator.register_for_checkpointing(schedule)
    model, optimizer, data, held_out = accelerator.prepare(model, optimizer, _data(ranks), _data(ranks))
    note("resume")
    accelerator.load_state()
    resumed = accelerator.resumed
    step = resumed.epoch * BATCHES + resumed.batch if resumed else 0
    while step < STEPS:
        for batch in data:
            note.step(step)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[0]).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                accelerator.save_state()
            if step == STEPS:
                break
        note("epoch")
        model.eval()
        with torch.no_grad():
            for batch in held_out:
                note("validation")
                time.sleep(0.05)
                accelerator.gather(model(batch[0]))
        model.train()
        schedule.step()
    accelerator.end_training()
    _end(directory, accelerator.process_index, accelerator.unwrap_model(model).parameters())


def _train_transformers(directory: Path, rank: int, ranks: int, note: _Notes) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from accelerate_ckpt.integrations.transformers import ResumableCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _network()

        def forward(self, inputs: Any, labels: Any) -> Any:
            output = self.layers(inputs)
            return {"loss": (output - labels).pow(2).mean(), "output": output}

    class Notes(TrainerCallback):
        def on_init_end(self, *_: Any, **__: Any) -> None:
            note("resume")

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            note.step(2 * state.global_step)

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            note.step(2 * state.global_step + 1)

        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            note("validation")
            time.sleep(0.05)

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            note("epoch")

    torch.manual_seed(1)
    rows = [{"inputs": row[0], "labels": row[0][:1]} for row in _data(ranks).dataset]
    arguments = TrainingArguments(
        str(directory / "saved"), max_steps=STEPS // 2, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        gradient_accumulation_steps=2, save_steps=SAVE_EVERY // 2, save_total_limit=3, eval_strategy="steps",
        eval_steps=5, learning_rate=0.01, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    trainer = Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows[: 8 * ranks], callbacks=[Notes()])
    own = _saves_just_in_time(directory, rank)
    ResumableCallback(trainer, resume="auto", preempt=",".join(SIGNALS), just_in_time=own)
    trainer.train()
    _end(directory, rank, trainer.accelerator.unwrap_model(trainer.model).parameters())


def train(framework: str, directory: Path, rank: int, ranks: int) -> None:
    """Train to the end, from where ``resume="auto"`` resumes."""
    import torch

    torch.set_num_threads(1)
    (directory / f"pid.{rank}").write_text(str(os.getpid()))
    trainings = {
        "lightning": _train_lightning,
        "accelerate": _train_accelerate,
        "transformers": _train_transformers,
    }
    trainings[framework](directory, rank, ranks, _Notes(directory, rank))


# ---- jobs
# ----------------------------------------------------------------------------------------------------------------------


class ForkedJob:
    """Ranks that are forked from this process, which has imported the modules that take long."""

    def __init__(self, framework: str, directory: Path, ranks: int) -> None:
        port = free_port()
        self.pids = [self._fork(framework, directory, rank, ranks, port) for rank in range(ranks)]
        self._left = set(self.pids)
        self._deadline: float | None = None
        self._shown = False
        self.killed = False  # whether a rank had to be killed when its grace was over
        self.statuses: list[int] = []

    def _fork(self, framework: str, directory: Path, rank: int, ranks: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        log = os.open(directory / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", ACCELERATE_USE_CPU="true")
        status = 1
        faulthandler.register(signal.SIGUSR2, all_threads=True)  # prints to the log where a rank hangs
        try:
            train(framework, directory, rank, ranks)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException as error:  # noqa: BLE001 - shown in the log
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            import atexit

            with contextlib.suppress(BaseException):
                threading._shutdown()
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
        overdue = time.monotonic() - self._deadline if self._left and self._deadline is not None else -1.0
        if overdue > -1.0 and not self._shown:
            self._shown = True
            self.send(signal.SIGUSR2, self._left)  # prints the stacks of the ranks to their logs
        if overdue > 0.0:
            self.killed = True
            self.send(signal.SIGKILL, self._left)
        return not self._left

    def send(self, number: int, pids: Any) -> None:
        for pid in list(pids):
            if pid in self._left:
                os.kill(pid, number)

    def close(self) -> None:
        self.send(signal.SIGKILL, self._left)


_LAUNCHERS: dict[str, Callable[[str], list[str]]] = {
    "own": lambda _: [],  # Lightning starts the other ranks itself
    "ray": lambda _: [],  # its workers train on threads, which do not see signals: send SIGKILL alone
    "torchrun": lambda ranks: ["torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m"],
    "torchrun-restarts": lambda ranks: [
        "torch.distributed.run", "--standalone", "--max-restarts", "1000", "--nproc-per-node", ranks, "-m"
    ],
    "accelerate-restarts": lambda ranks: [
        "accelerate.commands.launch", "--multi_gpu", "--num_processes", ranks, "--num_machines", "1", "--mixed_precision",
        "no", "--dynamo_backend", "no", "--rdzv_backend", "c10d", "--main_process_port", "0", "--max_restarts", "1000",
        "-m",
    ],
}  # fmt: skip
_RESTARTING = {"torchrun-restarts", "accelerate-restarts", "ray"}
LAUNCHERS = ("fork", *_LAUNCHERS)


class LaunchedJob(ForkedJob):
    """Ranks under a real launcher, one of ``LAUNCHERS``."""

    def __init__(self, framework: str, directory: Path, ranks: int, launcher: str) -> None:
        for rank in range(ranks):
            (directory / f"pid.{rank}").unlink(missing_ok=True)
        self._directory, self._ranks = directory, ranks
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (directory / "log.job").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *_LAUNCHERS[launcher](str(ranks)), "tests.chaos.unattended", framework,
                 str(directory), str(ranks), launcher],
                stdout=log, stderr=log, start_new_session=True, env=environment,
            )  # fmt: skip
        self.killed, self.statuses = False, []

    @property
    def pids(self) -> list[int]:
        return self._in_files(self._directory, self._ranks)

    @pids.setter
    def pids(self, _: Any) -> None: ...

    @staticmethod
    def _in_files(directory: Path, ranks: int) -> list[int]:
        files = [directory / f"pid.{rank}" for rank in range(ranks)]
        return [int(text) for text in (file.read_text() for file in files if file.exists()) if text]

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


class RestartedJob(LaunchedJob):
    """One attempt of a launcher that restarts all ranks by itself; the next attempt is the next job."""

    def __init__(self, framework: str, directory: Path, ranks: int, launcher: str) -> None:
        self._log, self._past, self._forced = directory / "log.job", set(self._in_files(directory, ranks)), 0
        super().__init__(framework, directory, ranks, launcher)

    def next_attempt(self) -> bool:
        """Become the next attempt; return false if the launcher has ended."""
        self._past |= set(self.pids)
        self.killed, self._forced = False, self._forcefully_ended()
        return self._process.poll() is None

    def _forcefully_ended(self) -> int:
        return self._log.read_text(errors="replace").count("forcefully exiting via")

    @property
    def pids(self) -> list[int]:
        return [pid for pid in self._in_files(self._directory, self._ranks) if pid not in self._past]

    @pids.setter
    def pids(self, _: Any) -> None: ...

    def is_over(self) -> bool:
        over = super().is_over()
        if not over and len(self.pids) == self._ranks:
            over = not any(map(_is_running, self.pids))
        if over:
            self.killed = self._forcefully_ended() > self._forced
        return over


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _started(framework: str, directory: Path, ranks: int, launcher: str, last: ForkedJob | None) -> ForkedJob:
    if isinstance(last, RestartedJob) and last.next_attempt():
        return last
    if launcher == "fork":
        return ForkedJob(framework, directory, ranks)
    return (RestartedJob if launcher in _RESTARTING else LaunchedJob)(framework, directory, ranks, launcher)


# ---- the campaign
# ----------------------------------------------------------------------------------------------------------------------


class _Run:
    """A training, which is started again and again until it has ended."""

    def __init__(self, directory: Path, ranks: int, just_in_time: bool, shards: int) -> None:
        self.directory, self.ranks = directory, ranks
        directory.mkdir(parents=True)
        (directory / _SHARDS).write_text(str(shards))
        if just_in_time:
            (directory / _JUST_IN_TIME).touch()
        self._changed = (time.monotonic(), -1)

    def notes(self) -> list[list[str]]:
        path = self.directory / "notes.0"
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def steps(self) -> list[int]:
        return [int(value) for moment, value in self.notes() if moment in ("step", "window")]

    def steps_over(self) -> int:
        """Return how often a start has skipped a checkpoint, because three starts before it had ended at once."""
        return self._said("skipped the checkpoint")

    @property
    def was_warned(self) -> bool:
        """Whether a resume has warned that it may not be exact."""
        return self._said("is not guaranteed to be exact") > 0

    def _said(self, words: str) -> int:
        logs = [self.directory / "log.0", self.directory / "log.job"]
        return sum(log.read_text(errors="replace").count(words) for log in logs if log.exists())

    @property
    def has_ended(self) -> bool:
        return all((self.directory / f"end.{rank}").exists() for rank in range(self.ranks))

    def wait(self, condition: Any) -> bool:
        """Wait for a condition; return False if no rank has noted anything for ``HANG_SECONDS``."""
        self._changed = (time.monotonic(), -1)
        while not condition():
            files = [self.directory / f"notes.{rank}" for rank in range(self.ranks)]
            size = sum(file.stat().st_size for file in files if file.exists())
            if size != self._changed[1]:
                self._changed = (time.monotonic(), size)
            elif time.monotonic() > self._changed[0] + HANG_SECONDS:
                return False
            time.sleep(0.005)
        return True


def _close_hanging(job: ForkedJob, directory: Path) -> None:
    """Write the stacks of all ranks to logs, and end the job."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    with (directory / "hang.log").open("a") as log:
        for pid in job.pids if spy else []:
            subprocess.run([spy, "dump", "--pid", str(pid)], stdout=log, stderr=log, check=False)
    if not isinstance(job, LaunchedJob):
        job.send(signal.SIGUSR2, job.pids)
        time.sleep(1.0)
    job.close()


def _whole(framework: str, run: _Run, launcher: str) -> str:
    job = _started(framework, run.directory, run.ranks, launcher, None)
    is_over = run.wait(job.is_over)
    if not is_over:
        _close_hanging(job, run.directory)
    job.close()
    if not run.has_ended:
        raise RuntimeError(f"the run without interruptions {'failed' if is_over else 'hangs'}: look at {run.directory}")
    return (run.directory / "end.0").read_text()


def campaign(
    framework: str,
    directory: Path,
    interruptions: int,
    *,
    seed: int = 1,
    launcher: str = "fork",
    ranks: int = 2,
    just_in_time: bool = False,
    shards: int = 1,
) -> Any:
    """Interrupt runs so many times; return the outcome.

    Args:
        framework: One of ``FRAMEWORKS``.
        directory: Directory for all files; must not exist.
        interruptions: Number of interruptions.
        seed: Seed of what is done, and when.
        launcher: One of ``LAUNCHERS``.
        ranks: Processes of each run.
        just_in_time: Kill one rank at a time, in a step, and let the others save.
        shards: Number of shards of the model, each on several ranks (Lightning, HSDP).

    Returns:
        A dictionary: interruptions, runs, hangs, runs that ended with different bits without and with a warning, ranks
        that had to be killed; and, by kind and by moment of the interruption, the batches that were lost each time.
    """
    for module in FRAMEWORKS[framework] if launcher == "fork" else []:
        importlib.import_module(module)
    chance = random.Random(seed)
    expected = _whole(framework, _Run(directory / "whole", ranks, just_in_time, shards), launcher)
    found: dict[str, Any] = {"interruptions": 0, "runs": 0, "hangs": [], "different": []}
    found |= {"warned": [], "killed_after_grace": [], "costly": []}  # the last: just in time, more than one step
    lost: dict[str, list[int]] = collections.defaultdict(list)
    moments: dict[str, list[int]] = collections.defaultdict(list)
    statuses: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    while found["interruptions"] < interruptions:
        run = _Run(directory / f"run{found['runs']}", ranks, just_in_time, shards)
        found["runs"] += 1
        job: ForkedJob | None = None
        before: list[tuple[str, str, int]] = []  # what has interrupted since the last step: kind, moment, steps done
        while not run.has_ended:
            seen, noted, stepped = len(run.steps()), len(run.notes()), run.steps_over()
            moment, times = chance.choice(["step", "window"] if just_in_time else MOMENTS), chance.randint(1, 12)
            job = _started(framework, run.directory, ranks, launcher, job)
            begin, delay = time.monotonic(), chance.uniform(0.0, 3.0)

            def is_time(
                job: ForkedJob = job, run: _Run = run, noted: int = noted, moment: str = moment, times: int = times,
                latest: float = begin + delay,
            ) -> bool:  # fmt: skip
                if moment == "start":
                    return time.monotonic() > latest and len(job.pids) == ranks
                names = [name for name, _ in run.notes()[noted:]]
                return names.count(moment) >= (1 if moment == "resume" else times)

            came = run.wait(lambda job=job, is_time=is_time: job.is_over() or is_time())
            time.sleep(chance.uniform(0.0, 0.03))
            kind, at = "nothing", len(run.steps())
            if came and not job.is_over():
                kind = _interrupt(job, run, chance, ranks, just_in_time=just_in_time)
                found["interruptions"] += 1
                at = len(run.steps())
                came = run.wait(job.is_over)
            if not came:
                found["hangs"].append(f"{run.directory}: {kind} at {moment}")
                _close_hanging(job, run.directory)
                break
            if not isinstance(job, RestartedJob) or run.has_ended:
                job.close()
            if job.killed:
                found["killed_after_grace"].append(f"{run.directory}: {kind} at {moment}, step {at}")
            if kind != "nothing":
                statuses[kind][str(sorted(job.statuses))] += 1
            steps = run.steps()
            if len(steps) > seen:
                for index, (earlier, when, done) in enumerate(before):
                    amount = done - steps[seen] if index == 0 and done else 0
                    if just_in_time and amount > 2:
                        found["costly"].append(f"{run.directory}: {amount} batches lost before {steps[seen]}")
                    lost["killed at once, three times" if run.steps_over() > stepped else earlier].append(amount)
                    moments[when].append(amount)
                before = []
            if kind != "nothing":
                before.append((kind, moment, steps[-1] + 1 if steps else 0))
        if run.has_ended and any((run.directory / f"end.{rank}").read_text() != expected for rank in range(ranks)):
            found["warned" if just_in_time and run.was_warned else "different"].append(str(run.directory))
    return {
        **found,
        "lost_batches": dict(lost),
        "moments": dict(moments),
        "statuses": {kind: dict(each) for kind, each in statuses.items()},
    }


def _interrupt(job: ForkedJob, run: _Run, chance: random.Random, ranks: int, *, just_in_time: bool) -> str:
    """Send a signal to one or more ranks, perhaps twice; return a description of that."""
    if just_in_time:
        target = chance.randrange(ranks)
        job.send(signal.SIGKILL, [job.pids[target]])
        return f"SIGKILL to {'rank 0' if target == 0 else 'another rank'}"
    name = chance.choice(["SIGTERM", "SIGTERM", "SIGUSR1", "SIGKILL", "SIGKILL"])
    number = getattr(signal, name)
    count = chance.choice(sorted({1, min(2, ranks), ranks}))
    to = "all ranks" if count == ranks else "one rank" if count == 1 else "some ranks"
    pids = job.pids
    targets = chance.sample(pids, min(count, len(pids)))
    again = name != "SIGKILL" and chance.random() < 0.35
    noted = len(run.notes())
    job.send(number, targets)
    if not again:
        return f"{name} to {to}"
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0.0, 0.7))
    else:  # while a rank saves because of the first signal
        until = time.monotonic() + 5.0
        while time.monotonic() < until and not job.is_over():
            if "save" in [moment for moment, _ in run.notes()[noted:]]:
                break
            time.sleep(0.005)
    second = chance.choice(["SIGTERM", "SIGTERM", "SIGKILL"])
    job.is_over()
    job.send(getattr(signal, second), chance.sample(pids, chance.randint(1, len(pids))))
    return f"{name}, then {second}"


def _train_under_ray(framework: str, directory: str, ranks: int) -> None:
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    def work(_: Any) -> None:
        train(framework, Path(directory), ray.train.get_context().get_world_rank(), ranks)

    TorchTrainer(
        work,
        train_loop_config={},
        scaling_config=ray.train.ScalingConfig(num_workers=ranks),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name="ray", storage_path=directory, failure_config=ray.train.FailureConfig(max_failures=-1)
        ),
    ).fit()


if __name__ == "__main__":
    framework, directory, ranks, launcher = sys.argv[1:]
    if launcher == "ray":
        _train_under_ray(framework, directory, int(ranks))
    else:
        rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        train(framework, Path(directory), rank, int(ranks))
