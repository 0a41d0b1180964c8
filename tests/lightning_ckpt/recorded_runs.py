"""Runs a training three times in forked processes, uninterrupted, killed with SIGKILL and resumed, and judges it twice.

The judge from outside compares the bits of weights, batches and logged rows with those of the uninterrupted run. The
other is the flight recorder, which sees the killed and the resumed run only. :data:`CASES` are trainings with and
without a state that nobody captures, and trainings whose engine is made to forget something at the resume.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging
from lightning.pytorch.loggers import Logger
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler

from ckpt_core.state.rng import RngState
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint
from lightning_ckpt._exact.loaders import TrainingData

__all__ = ["CASES", "Judgement", "judge"]

F = torch.nn.functional


class Items(Dataset[Any]):
    """Samples with noise from the global generators, or from ``draw``."""

    def __init__(self, length: int = 48, draw: Callable[[], torch.Tensor] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, 8, generator=generator)
        self.y = torch.randint(0, 3, (length,), generator=generator)
        self.draw = draw or functools.partial(torch.randn, 8)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * self.draw(), self.y[index], index


class Stream(IterableDataset[Any]):
    """Items in an order that depends on how often it was read, or on nothing."""

    def __init__(self, *, counts: bool, stateful: bool = False) -> None:
        self.items, self.counts, self.passes, self.position = Items(draw=lambda: torch.zeros(8)), counts, 0, 0
        if stateful:
            self.state_dict = lambda: {"position": self.position, "passes": self.passes}  # type: ignore[method-assign]
            self.load_state_dict = vars(self).update

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.items)))
        if self.counts:
            random.Random(self.passes).shuffle(order)
            self.passes += 1
        return iter([self.items[i] for i in order])


class OwnNoise:
    """What transforms with a generator of their own look like."""

    def __init__(self, kind: str) -> None:
        self.torch, self.numpy = torch.Generator().manual_seed(5), np.random.default_rng(5)
        self.python, self.kind = random.Random(5), kind

    def __call__(self) -> torch.Tensor:
        if self.kind == "torch":
            return torch.randn(8, generator=self.torch)
        if self.kind == "numpy":
            return torch.from_numpy(self.numpy.standard_normal(8).astype("f4"))
        return torch.tensor([self.python.random() for _ in range(8)])


class InPlaceSampler(Sampler[Any]):
    """Shuffles its own list, batches or not."""

    def __init__(self, length: int, batch: int | None, kind: str = "list") -> None:
        self.order: Any = np.arange(length) if kind == "array" else list(range(length))
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length if self.batch is None else self.length // self.batch

    def __iter__(self) -> Iterator[Any]:
        (np.random if isinstance(self.order, np.ndarray) else random).shuffle(self.order)
        order = [int(i) for i in self.order]
        if self.batch is None:
            return iter(order)
        return iter([order[i : i + self.batch] for i in range(0, len(order), self.batch)])


class Model(pl.LightningModule):
    """A small classifier with batch normalisation and dropout."""

    def __init__(self, loader: Callable[[], Any], kind: str = "plain", cause: str = "") -> None:
        super().__init__()
        self.loader, self.kind, self.cause = loader, kind, cause
        self.automatic_optimization = kind not in ("manual", "gan")
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU())
        self.head = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(16, 3))
        self.factor, self.own, self.calls = 1.0, torch.Generator().manual_seed(3), 0

    def train_dataloader(self) -> Any:
        return self.loader()

    def val_dataloader(self) -> Any:
        return DataLoader(Items(16), batch_size=8, shuffle=self.kind == "validates") if self.kind == "validates" else []

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", F.cross_entropy(self.head(self.backbone(batch[0])), batch[1]))

    def on_train_epoch_start(self) -> None:
        if self.cause == "annealing":
            self.factor = 1.0 / (1 + self.current_epoch)
        elif self.cause == "eval" and self.current_epoch:
            self.backbone.eval()
        elif self.cause == "freeze" and self.current_epoch:
            self.backbone.requires_grad_(False)
        elif self.cause == "set_epoch":
            self.trainer.train_dataloader.dataset.passes = self.current_epoch

    def training_step(self, batch: Any, index: int) -> Any:
        if isinstance(batch, dict):
            batch = batch["a"]
        x, y = batch[0], batch[1]
        if self.cause == "noise":
            x = x + 0.1 * torch.randn(x.shape, generator=self.own)
        if self.cause == "calls":
            self.calls += 1
            self.factor = 1.0 + 0.1 * (self.calls % 5)
        if self.kind in ("manual", "gan"):
            return self._by_hand(x, y)
        loss = self.factor * F.cross_entropy(self.head(self.backbone(x)), y)
        self.log("loss", loss, prog_bar=True)
        return None if self.kind == "skips" and index == 2 else loss

    def _by_hand(self, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            loss = self.factor * F.cross_entropy(self.head(self.backbone(x)), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.cause == "module hook":
            with torch.no_grad():
                self.head[1].weight.mul_(0.99)

    def configure_optimizers(self) -> Any:
        if self.kind == "gan":
            return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.backbone, self.head)], []
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        optimizer = (torch.optim.SGD if self.kind == "sgd" else torch.optim.AdamW)(self.parameters(), lr=1e-2)
        if self.kind == "scheduled":
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-1, total_steps=100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        return optimizer


class Ema(Callback):
    """Averages weights in a plain attribute (or, ``saved``, with a state)."""

    def __init__(self, saved: bool) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.saved = saved

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for name, weight in module.head.named_parameters():
                self.average[name] = average = (self.average.get(name, weight) * 0.9 + weight * 0.1).clone()
                weight.lerp_(average, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average) if self.saved else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = dict(state)


class Unfreeze(BaseFinetuning):
    """Freezes the backbone for an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class Rows(Logger):
    """Keeps what is logged."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append([step, {name: float(value).hex() for name, value in sorted(metrics.items())}])

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Spy(Callback):
    """Writes down the batches, and kills before one of them."""

    def __init__(self, kill: list[int] | None) -> None:
        self.kill, self.seen = kill, list[Any]()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self.kill == [trainer.current_epoch, index]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append([trainer.current_epoch, index, trainer.global_step, _sha(batch)])


def _sha(value: Any) -> str:
    digest = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, dict):
            item = list(item.values())
        if isinstance(item, (list, tuple)):
            for part in item:
                add(part)
        else:
            digest.update(item.detach().numpy().tobytes() if torch.is_tensor(item) else repr(item).encode())

    add(value)
    return digest.hexdigest()[:16]


# ---- the cases -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A training.

    Args:
        loader: Makes the training loader.
        kind: How the model trains.
        cause: What the model does that nobody captures.
        callbacks: Makes callbacks.
        trainer: Arguments of the Trainer.
        forget: What the engine is made to do wrong when it resumes.
        is_exact: Whether a resume has to be exact; None where that is not this package's to say.
    """

    loader: Callable[[], Any]
    kind: str = "plain"
    cause: str = ""
    callbacks: Callable[[], list[Any]] = list
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    forget: Callable[[pl.Trainer], None] | None = None
    is_exact: bool | None = True


def _map(**settings: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Items(), **{"batch_size": 8, "shuffle": True, **settings})


def _of(make: Callable[[], Any], **settings: Any) -> Callable[[], Any]:
    return lambda: DataLoader(make(), batch_size=8, **settings)


def _collate_with_noise() -> Any:
    own = torch.Generator().manual_seed(4)

    def collate(samples: Any) -> Any:
        x, y, index = torch.utils.data.default_collate(samples)
        return x + torch.randn(x.shape, generator=own), y, index

    return DataLoader(Items(), batch_size=8, collate_fn=collate)


def _stateful_loader(**settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Items(), batch_size=8, shuffle=True, **settings)

    return make


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": _map(),
    "in order": _map(shuffle=False),
    "own generator": lambda: DataLoader(
        Items(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2)
    ),
    "two workers": _map(num_workers=2),
    "persistent workers": _map(num_workers=2, persistent_workers=True),
    "weighted": lambda: DataLoader(
        Items(), batch_size=8, sampler=torch.utils.data.WeightedRandomSampler(torch.arange(1.0, 49), 48)
    ),
    "stream": _of(lambda: Stream(counts=False)),
    "stream, one worker": _of(lambda: Stream(counts=False), num_workers=1),
    "stateful loader": _stateful_loader(),
    "stateful loader, two workers": _stateful_loader(num_workers=2),
    "dictionary": lambda: {"a": _map()(), "b": _map(batch_size=16)()},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd": {},
    "manual": {},
    "gan": {},
    "scheduled": {},
    "lbfgs": {},
    "skips": {},
    "validates": {"val_check_interval": 0.5},
    "accumulates": {"accumulate_grad_batches": 3},
    "clips": {"gradient_clip_val": 0.1},
}


def _forget_generators(trainer: pl.Trainer) -> None:
    RngState.restore = lambda self: None  # type: ignore[method-assign]


def _skip_batch(trainer: pl.Trainer) -> None:
    fetch = TrainingData._fetch
    done: list[bool] = []

    def skip(self: TrainingData, original: Callable[[], Any]) -> Any:
        if not done and not self.idle:
            done.append(True)
            original()
        return fetch(self, original)

    TrainingData._fetch = skip  # type: ignore[method-assign]


def _forget_moment(trainer: pl.Trainer) -> None:
    load = type(trainer.strategy).load_optimizer_state_dict

    def load_without(self: Any, checkpoint: Any) -> None:
        for state in checkpoint["optimizer_states"]:
            for of_parameter in state["state"].values():
                of_parameter["exp_avg"].zero_()
        load(self, checkpoint)

    type(trainer.strategy).load_optimizer_state_dict = load_without  # type: ignore[method-assign]


def _forget_buffer(trainer: pl.Trainer) -> None:
    load = type(trainer.strategy).load_model_state_dict

    def load_without(self: Any, checkpoint: Any, strict: bool = True) -> None:
        checkpoint["state_dict"]["backbone.1.running_mean"].zero_()
        load(self, checkpoint, strict=strict)

    type(trainer.strategy).load_model_state_dict = load_without  # type: ignore[method-assign]


def _forget_schedule(trainer: pl.Trainer) -> None:
    connector = trainer._checkpoint_connector
    connector.restore_lr_schedulers = lambda: None  # type: ignore[method-assign]


def _exact_cases() -> dict[str, Case]:
    found = {
        f"{loader}; {kind}": Case(make, "plain" if kind in ("accumulates", "clips") else kind, trainer=KINDS[kind])
        for (loader, make), kind in itertools.product(LOADERS.items(), KINDS)
        # each loader with one training, and each training with one loader; the campaign has more
        if loader in ("shuffled", "two workers", "stream", "stateful loader") or kind in ("plain", "accumulates")
    }
    callbacks = {
        "own average": lambda: [Ema(saved=True)],
        "early stopping": lambda: [pl.callbacks.EarlyStopping("loss", patience=100)],
        "two checkpoints": lambda: [ResumableCheckpoint(every_n_epochs=1, save_top_k=0)],
    }
    found |= {f"callback: {name}": Case(_map(), callbacks=make) for name, make in callbacks.items()}
    return found


def _maybe_inexact_cases() -> dict[str, Case]:
    found = {
        f"model: {cause}": Case(_map(), cause=cause) for cause in ("annealing", "eval", "freeze", "noise", "calls")
    }
    found["model: module hook"] = Case(_map(), cause="module hook")
    found["model: set_epoch"] = Case(_of(lambda: Stream(counts=True)), cause="set_epoch")
    found |= {
        f"data: {kind} generator in a transform": Case(
            lambda kind=kind: DataLoader(Items(draw=OwnNoise(kind)), batch_size=8)  # type: ignore[misc]
        )
        for kind in ("torch", "numpy", "python")
    }
    found |= {
        f"data: {kind} shuffled in place, batch {batch}": Case(
            lambda kind=kind, batch=batch: DataLoader(  # type: ignore[misc]
                Items(),
                **{"sampler" if batch is None else "batch_sampler": InPlaceSampler(48, batch, kind)},
                **({"batch_size": 8} if batch is None else {}),
            )
        )
        for kind, batch in itertools.product(("list", "array"), (None, 8))
    }
    found["data: generator in collate_fn"] = Case(_collate_with_noise)
    found["data: generator below ConcatDataset"] = Case(
        lambda: DataLoader(ConcatDataset([Items(24, OwnNoise("torch")), Items(24, OwnNoise("numpy"))]), batch_size=8)
    )
    found["data: stream counts its passes"] = Case(_of(lambda: Stream(counts=True)))
    found["data: stream counts its passes, worker"] = Case(_of(lambda: Stream(counts=True), num_workers=1))
    found["callback: average without a state"] = Case(_map(), callbacks=lambda: [Ema(saved=False)])
    found["callback: fine-tuning"] = Case(_map(), "sgd", callbacks=lambda: [Unfreeze()])
    found["callback: SWA"] = Case(_map(), callbacks=lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
    return {name: dataclasses.replace(case, is_exact=None) for name, case in found.items()}


def _broken_cases() -> dict[str, Case]:
    forget = {
        "generators": _forget_generators,
        "a batch": _skip_batch,
        "a moment": _forget_moment,
        "a buffer": _forget_buffer,
    }
    found = {f"engine forgets {name}": Case(_map(), forget=what) for name, what in forget.items()}
    found["engine forgets a schedule"] = Case(_map(), "scheduled", forget=_forget_schedule)
    return {name: dataclasses.replace(case, is_exact=False) for name, case in found.items()}


CASES: dict[str, Case] = {**_exact_cases(), **_maybe_inexact_cases(), **_broken_cases()}


# ---- three runs ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What became of one resume.

    Attributes:
        is_exact: Whether weights, batches and logged rows are those of the uninterrupted run, None after a crash.
        recorder: The recorder's message, empty if it had none.
        differs: What differed by it.
        warned: All warnings about exactness.
        repeated: How many steps the resumed run had to repeat.
        problem: The traceback of a crash.
    """

    is_exact: bool | None
    recorder: str = ""
    differs: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    repeated: int = 0
    problem: str = ""

    @property
    def verdict(self) -> str:
        """In one word: ``equal``, ``said``, ``warned`` (by something else) and so on."""
        if self.is_exact is None:
            return "crashed"
        if self.is_exact:
            return "false alarm" if self.differs else ("equal" if self.recorder else "nothing to compare")
        if self.differs:
            return "said"
        return "warned" if self.warned else ("WRONGLY EQUAL" if self.recorder else "silent")


def judge(case: Case, kill: list[int], directory: Path, *, every: int = 2) -> Judgement:
    """Train three times.

    Args:
        case: The training.
        kill: Epoch and batch before which the second run is killed.
        directory: An empty one.
        every: Steps between two saves.
    """
    for name, dies_at in (("base", None), ("killed", kill), ("resumed", None)):
        status = _in_a_fork(functools.partial(_train, case, name, dies_at, directory, every), directory / f"{name}.log")
        if status != (signal.SIGKILL if dies_at else 0):
            return Judgement(None, problem=f"{name}: {status}\n{(directory / f'{name}.log').read_text()[-2000:]}")
        if name == "base":
            shutil.rmtree(directory / "checkpoints")
    base, resumed = (json.loads((directory / f"{name}.json").read_text()) for name in ("base", "resumed"))
    seen, rows = resumed["seen"], resumed["rows"]
    is_exact = (base["weights"], base["step"]) == (resumed["weights"], resumed["step"])
    is_exact &= base["seen"][len(base["seen"]) - len(seen) :] == seen
    is_exact &= base["rows"][len(base["rows"]) - len(rows) :] == rows
    events = [json.loads(line) for line in (directory / "resumed.events").read_text().splitlines()]
    compared = [event for event in events if event["event"] == "ResumeCompared"]
    index = {(epoch, batch): number for number, (epoch, batch, *_) in enumerate(base["seen"])}
    repeated = index.get((kill[0], kill[1]), 0) - index.get((seen[0][0], seen[0][1]), 0) if seen else 0
    return Judgement(
        is_exact,
        "; ".join(event["message"] for event in compared),
        tuple(name for event in compared for name in event["differs"]),
        tuple(resumed["warned"]),
        repeated,
    )


def _train(case: Case, name: str, kill: list[int] | None, directory: Path, every: int) -> None:
    pl.seed_everything(7, workers=True, verbose=False)
    rows, spy = Rows(), Spy(kill)
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 3,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **case.trainer,
        },
        logger=rows,
        default_root_dir=directory,
        callbacks=[
            spy,
            *case.callbacks(),
            ResumableCheckpoint(directory / "checkpoints", every_n_train_steps=every, save_top_k=-1),
        ],
        plugins=[AsyncCheckpointIO(event_log=str(directory / f"{name}.events"))],
    )
    model = Model(case.loader, case.kind, case.cause)
    if case.forget is not None and name == "resumed":
        case.forget(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, ckpt_path="last" if name == "resumed" else None)
    outcome = {
        "weights": _sha([tensor for _, tensor in sorted(model.state_dict().items())]),
        "step": trainer.global_step,
        "seen": spy.seen,
        "rows": rows.rows,
        "warned": [text for text in map(str, (w.message for w in caught)) if "not exact" in text or "be exact" in text],
    }
    (directory / f"{name}.json").write_text(json.dumps(outcome))


def _in_a_fork(work: Callable[[], None], log: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - this process ends here
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else os.WTERMSIG(status)
