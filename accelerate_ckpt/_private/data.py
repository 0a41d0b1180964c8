"""The only module that uses private parts of Accelerate's data loaders; lists the private names of an Accelerator.

Accelerate has no hook around the iteration of a prepared loader, creates the inner loader's iterator inside it and
reads one batch ahead; its ``skip_first_batches`` returns another loader, whose progress is lost. What is needed to
track and to resume an iteration is here, each use with its reason. :func:`check` raises one clear error when a plugin
is attached, if a release has moved a name; :meth:`~accelerate_ckpt._data.position.LoaderPosition.iterate` raises if a
release creates its iterators differently.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
from accelerate import accelerator as accelerator_module
from accelerate import data_loader

from ckpt_core.errors import CheckpointError

_NEEDED = {
    "DataLoaderShard": ("__iter__", "begin", "end", "end_of_dataloader", "remainder", "set_epoch"),
    "DataLoaderDispatcher": ("__iter__", "_fetch_batches", "begin", "end", "end_of_dataloader", "set_epoch"),
    "BatchSamplerShard": ("_iter_with_no_split", "_iter_with_split"),
    "IterableDatasetShard": ("__iter__",),
}
_NEEDED_ARGUMENTS = {
    "DataLoaderAdapter": ("use_stateful_dataloader",),
    "DataLoaderDispatcher": ("split_batches", "slice_fn", "_drop_last"),
    "DataLoaderShard": ("synchronized_generator", "_drop_last"),
    "BatchSamplerShard": ("batch_sampler", "num_processes", "process_index", "split_batches", "even_batches"),
    "IterableDatasetShard": ("batch_size", "drop_last", "num_processes", "split_batches"),
    "skip_first_batches": ("dataloader", "num_batches"),
}
# Lists of all objects that it has prepared and registered, which have no public name; ``_state``, ``_data`` read them.
_NEEDED_OF_AN_ACCELERATOR = (
    "_custom_objects",
    "_dataloaders",
    "_load_model_state_pre_hook",
    "_models",
    "_optimizers",
    "_save_model_state_pre_hook",
    "_schedulers",
)
_REMEDY = "use Accelerate 1.10 to 1.15"


def missing_internals(accelerator: Any) -> list[str]:
    """Return the private names this package uses that this release of Accelerate does not have."""
    missing = [f"Accelerator.{name}" for name in _NEEDED_OF_AN_ACCELERATOR if not hasattr(accelerator, name)]
    for owner, names in _NEEDED.items():
        found = getattr(data_loader, owner, None)
        missing += [f"data_loader.{owner}.{name}" for name in names if not hasattr(found, name)]
    for owner, arguments in _NEEDED_ARGUMENTS.items():
        found = getattr(data_loader, owner, None)
        known = inspect.signature(found).parameters if found is not None else {}
        missing += [f"data_loader.{owner}({name})" for name in arguments if name not in known]
    if not hasattr(accelerator_module, "skip_first_batches"):
        missing.append("accelerator.skip_first_batches")
    return missing


def check(accelerator: Any) -> None:
    """Raise ``CheckpointError`` if this release of Accelerate lacks a private name that exact resume needs."""
    missing = missing_internals(accelerator)
    if missing:
        raise unsupported_release(f"it has no {', '.join(missing)}")


def unsupported_release(what: str) -> CheckpointError:
    """Return the error for a release of Accelerate that differs from those that are supported."""
    return CheckpointError(
        f"exact resume does not work with accelerate {accelerate.__version__}: {what}", remedy=_REMEDY
    )


_finders: weakref.WeakSet[Any] = weakref.WeakSet()  # :class:`~accelerate_ckpt._data.loaders.LoaderPositions`


def _follower_of(loader: Any) -> Any:
    for finder in list(_finders):
        follower = finder.find(loader)
        if follower is not None:
            return follower
    return None


def register(finder: Any) -> None:
    """Run iterations of a loader through the object that ``finder.find(loader)`` returns, while the finder is alive."""
    _patch_iteration(data_loader.DataLoaderShard)
    _patch_iteration(data_loader.DataLoaderDispatcher)
    _patch_skip_first_batches()
    _finders.add(finder)


def unregister(finder: Any) -> None:
    """Undo :func:`register` for this finder."""
    _finders.discard(finder)


def _patch_iteration(loader_class: Any) -> None:
    # iter() looks up __iter__ on the class, which cannot be changed for one loader, because the loaders fake theirs
    stock = loader_class.__iter__
    if getattr(stock, "ckpt_stock", None) is not None:
        return

    @functools.wraps(stock)
    def iterate(self: Any) -> Iterator[Any]:
        follower = _follower_of(self)
        iterator: Iterator[Any] = stock(self) if follower is None else follower.iterate(stock)
        return iterator

    iterate.ckpt_stock = stock  # type: ignore[attr-defined]
    loader_class.__iter__ = iterate


def _patch_skip_first_batches() -> None:
    stock = data_loader.skip_first_batches
    if getattr(stock, "ckpt_stock", None) is None:

        @functools.wraps(stock)
        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            skipped = getattr(type(dataloader), "ckpt_skip_more", None)
            if skipped is not None:
                return skipped(dataloader, num_batches)
            follower = _follower_of(dataloader)
            if follower is None:
                return stock(dataloader, num_batches)
            return follower.skip_first_batches(num_batches)

        skip_first_batches.ckpt_stock = stock  # type: ignore[attr-defined]
        data_loader.skip_first_batches = skip_first_batches
    ours = data_loader.skip_first_batches
    stock = ours.ckpt_stock
    # accelerate itself has it in three modules, and a script may have imported it by name before it attached
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {}).get("skip_first_batches")
        if held is stock:
            module.__dict__["skip_first_batches"] = ours


class Internals:
    """The private parts of one prepared loader, a ``DataLoaderShard`` or ``DataLoaderDispatcher``."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.base = loader.base_dataloader
        self.is_dispatcher = isinstance(loader, data_loader.DataLoaderDispatcher)

    @staticmethod
    def is_known(loader: Any) -> bool:
        """Return whether the loader is of a class whose iteration is supported."""
        return isinstance(loader, (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher))

    # ---- how a loader divides its data -------------------------------------------------------------------------------

    @property
    def shard(self) -> Any:
        """The object that divides the data over the ranks; None if every batch is this rank's, or is dispatched."""
        data = (self.base.batch_sampler, self.base.sampler, self.base.dataset)
        kinds = (data_loader.BatchSamplerShard, data_loader.IterableDatasetShard)
        return next((part for part in data if isinstance(part, kinds)), None)

    @property
    def ranks(self) -> int:
        """Number of ranks that the data is divided over."""
        if self.is_dispatcher:
            return int(self.loader.state.num_processes)
        return 1 if self.shard is None else int(self.shard.num_processes)

    @property
    def split_batches(self) -> bool:
        """Whether one batch of the script's loader makes one step of all ranks, instead of one for each."""
        if self.is_dispatcher:
            return bool(self.loader.split_batches)
        return bool(getattr(self.shard, "split_batches", False))

    @property
    def source_batches(self) -> int:
        """Number of batches of the script's loader that make one step of all ranks."""
        return 1 if self.split_batches else self.ranks

    @property
    def fetches(self) -> int:
        """Number of batches that this rank fetches for one step."""
        if not self.is_dispatcher:
            return 1
        return self.source_batches if self.loader.state.process_index == 0 else 0

    @property
    def may_be_uneven(self) -> bool:
        """Whether a rank may have one batch less than another."""
        shard = self.shard
        if not isinstance(shard, data_loader.BatchSamplerShard):
            return False
        return not shard.even_batches and not shard.drop_last

    # ---- its iterators -----------------------------------------------------------------------------------------------

    def before_iterator(self, make: Callable[[], Iterator[Any]]) -> None:
        """Make the inner loader create its iterators by ``make``.

        Accelerate calls ``base_dataloader.__iter__()`` as a method, so an attribute of the object suffices.
        """
        vars(self.base)["__iter__"] = _Hook(self.base, make)

    def make_iterator(self) -> Iterator[Any]:
        """Create an iterator of the inner loader by its own method."""
        iterator: Iterator[Any] = type(self.base).__iter__(self.base)
        return iterator

    def forget_iterator(self) -> None:
        """Make the next iterator a new one, with new workers.

        Persistent workers have drawn from their generators, and a stateful loader creates its first iterator when
        Accelerate prepares it, before it was tracked.
        """
        if getattr(self.base, "_iterator", None) is not None:
            self.base._iterator = None
        if getattr(self.base, "_initial_iter_for_state_dict", False):
            self.base._initial_iter_for_state_dict = False

    def forget_loaded_state(self) -> None:
        """Drop the state that the script has loaded into a stateful loader, so that it does not move the position."""
        if getattr(self.base, "next_iter_state", None) is not None:
            self.base.next_iter_state = None

    @property
    def has_early_iterator(self) -> bool:
        """Whether a stateful loader has created an iterator before its first iteration."""
        return bool(getattr(self.base, "_initial_iter_for_state_dict", False))

    def release(self) -> None:
        """Leave the inner loader as it was."""
        vars(self.base).pop("__iter__", None)
        if self.is_dispatcher and isinstance(self.loader.slice_fn, _FirstRows):
            self.loader.slice_fn = self.loader.slice_fn.inner

    # ---- the rows that complete a dispatched loader's last batch -----------------------------------------------------

    def follow_first_rows(self, saved: list[Any] | None) -> None:
        """Keep the rows of a pass's first batch, or in a resumed pass use the saved ones.

        The dispatcher completes a last batch that it cannot divide with rows of the first one, which a resumed pass has
        not read. It cuts these rows out with its first call of ``slice_fn``.
        """
        if not self.is_dispatcher or self.loader._drop_last:
            return
        inner = self.loader.slice_fn
        self.loader.slice_fn = _FirstRows(inner.inner if isinstance(inner, _FirstRows) else inner, saved)

    @property
    def first_rows(self) -> list[Any] | None:
        """The tensors of those rows, on the host."""
        rows = (
            self.loader.slice_fn.rows if self.is_dispatcher and isinstance(self.loader.slice_fn, _FirstRows) else None
        )
        return None if rows is None else [tensor.detach().to("cpu", copy=True) for tensor in rows]


class _Hook:
    def __init__(self, base: Any, make: Callable[[], Iterator[Any]] | None = None) -> None:
        self.base = base
        self.make = make

    def __call__(self) -> Iterator[Any]:
        made: Iterator[Any] = self.make() if self.make is not None else type(self.base).__iter__(self.base)
        return made

    def __reduce__(self) -> Any:
        # a prepared loader can be pickled and copied; the copy is not tracked
        return _Hook, (None,), {"base": self.base, "make": None}


class _FirstRows:
    def __init__(self, inner: Callable[..., Any], saved: list[Any] | None) -> None:
        self.inner = inner
        self.rows: list[Any] | None = None
        self._saved = saved

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.inner(*args, **kwargs)
        if self.rows is None:
            saved = self._saved
            if saved is not None:
                left = iter(saved)
                result = accelerate.utils.recursively_apply(lambda tensor: next(left).to(tensor.device), result)
            rows: list[Any] = []
            accelerate.utils.recursively_apply(rows.append, result)
            self.rows = rows
        return result


def inner_batch_sampler(sampler: Any) -> Any:
    """Return the batch sampler whose batches are divided over the ranks; it is the same for any number of ranks."""
    return sampler.batch_sampler if isinstance(sampler, data_loader.BatchSamplerShard) else sampler


def over_other_batches(sampler: Any, batches: Any) -> Any:
    """Return a sampler that divides ``batches`` as ``sampler`` divides its own."""
    if not isinstance(sampler, data_loader.BatchSamplerShard):
        return batches
    shard = copy.copy(sampler)
    shard.batch_sampler = batches
    return shard


def is_iterable_shard(dataset: Any) -> bool:
    """Return whether a data set is Accelerate's wrapper that divides an iterable one over the ranks."""
    return isinstance(dataset, data_loader.IterableDatasetShard)
