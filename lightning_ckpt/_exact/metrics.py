"""Captures and restores logged values that are open at a save: means in progress, torchmetrics, last known values."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection, MetricTracker, SumMetric

from ckpt_core.process.console import warn
from ckpt_core.state.object_walk import OF_EVERY_MODULE
from lightning_ckpt._private.loops import Internals

_OF_EVERY_METRIC = frozenset(vars(SumMetric()))
_MEMBERS = 256
_PLAIN = (bool, int, float, torch.Tensor)
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # on its device: the save copies it from there without waiting for the device
    return value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _plain(metric: Metric) -> dict[str, Any]:
    # attributes that are no metric states, such as the position in a running window, or the extremes so far
    return {
        name: value
        for name, value in vars(metric).items()
        if name not in _OF_EVERY_METRIC and name not in metric._defaults and isinstance(value, _PLAIN)
    }


def _state(metric: Metric, plain: Mapping[str, Any]) -> dict[str, Any]:
    # states are changed in place, but tensors in a list state are not
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {
        "plain": plain,
        "states": {
            name: list(map(_detached, value)) if isinstance(value, list) else value.detach().clone()
            for name, value in states.items()
        },
        "updates": metric._update_count,
    }


@dataclasses.dataclass(frozen=True)
class FollowedMetric:
    """A torchmetric of the model: where it is, and its plain attributes when it was found first."""

    name: str
    metric: Metric
    begun: Mapping[str, Any]

    def state(self) -> dict[str, Any] | None:
        """Return its state, if it has been updated."""
        plain = {n: _copy(v) for n, v in _plain(self.metric).items() if not _same(v, self.begun.get(n))}
        # a metric that wraps others may be updated without counting the update
        return _state(self.metric, plain) if plain or self.metric._update_count else None


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and value.device == other.device and torch.equal(value, other)
    return value is other or (type(value) is type(other) and not isinstance(value, torch.Tensor) and value == other)


@dataclasses.dataclass(frozen=True)
class MetricsMoment:
    """All logged values at one moment; cheap enough to take with every batch."""

    # The values logged in this epoch so far. They are replaced, never changed, so they are not copied.
    results: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, Mapping[str, Any]]  # state of each torchmetric of the model that has been updated
    connector: Mapping[str, Any]  # the values last given to callbacks, loggers and the progress bar

    @classmethod
    def take(cls, internals: Internals, metrics: Iterable[FollowedMetric]) -> MetricsMoment:
        """Read all logged values, and the torchmetrics of the model."""
        results = {
            key: {
                "value": result.value if result.is_tensor else None,
                "weight": getattr(result, "cumulated_batch_size", None),
                "last": result._forward_cache,
                "updates": result._update_count,
                "has_reset": result.has_reset,
            }
            for key, result in internals.results.items()
        }
        return cls(
            results,
            {followed.name: state for followed in metrics if (state := followed.state()) is not None},
            internals.logged(),
        )

    def encode(self, internals: Internals) -> dict[str, Any]:
        """Return the values as plain data and tensors, which stay on their devices."""
        live = internals.results
        return {
            "results": {
                key: {**{name: _copy(value) for name, value in state.items()}, "meta": _encode_meta(live[key])}
                for key, state in self.results.items()
                if live[key].meta.sync.group is None
            },
            "metrics": {
                name: {
                    "states": dict(state["states"]),  # copies already, and lists of tensors that never change
                    "plain": dict(state["plain"]),
                    "updates": state["updates"],
                }
                for name, state in self.metrics.items()
            },
            "trackers": {name: len(tracker) for name, tracker in _trackers(internals.trainer.lightning_module)},
            "connector": {
                name: {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value
                for name, value in self.connector.items()
            },
        }


def torchmetrics_of(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    """Find the torchmetrics of a model, with their names, also those in plain lists and dictionaries."""
    found: dict[int, tuple[str, Metric]] = {}
    for child in module.modules():
        if isinstance(child, MetricCollection):
            # members that share a state get it only when they are accessed
            child.values(copy_state=False)
    for name, child in module.named_modules():
        if isinstance(child, Metric):
            found.setdefault(id(child), (name, child))
        for attribute, value in vars(child).items():
            if attribute not in OF_EVERY_MODULE and isinstance(value, (list, tuple, dict)) and len(value) <= _MEMBERS:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in items:
                    if isinstance(item, (Metric, MetricCollection)):
                        prefix = ".".join(filter(None, (name, attribute, str(key))))
                        for path, metric in torchmetrics_of(item):
                            found.setdefault(id(metric), (".".join(filter(None, (prefix, path))), metric))
    return list(found.values())


def follow_metrics(module: torch.nn.Module, known: Iterable[FollowedMetric] = ()) -> list[FollowedMetric]:
    """Find the torchmetrics of a model; those in ``known`` keep the attributes that they were first found with."""
    begun = {id(followed.metric): followed.begun for followed in known}
    found = []
    for name, metric in torchmetrics_of(module):
        plain = {n: _copy(v) for n, v in _plain(metric).items()}
        found.append(FollowedMetric(name, metric, begun.get(id(metric), plain)))
    return found


def _trackers(module: torch.nn.Module) -> list[tuple[str, MetricTracker]]:
    return [(name, child) for name, child in module.named_modules() if isinstance(child, MetricTracker)]


def _encode_meta(result: Any) -> dict[str, Any]:
    meta = result.meta
    reduce_fx = meta.reduce_fx
    place = "builtins" if getattr(builtins, reduce_fx.__name__, None) is reduce_fx else "torch"
    return {
        **{name: getattr(meta, name) for name in _META},
        "reduce_fx": [place, reduce_fx.__name__],
        "dataloader_idx": meta.dataloader_idx,
        "metric_attribute": meta.metric_attribute,
        "sync": [bool(meta.sync.should), bool(meta.sync.rank_zero_only), meta.sync.op],
        "is_tensor": result.is_tensor,
        "dtype": str(result._defaults["value"].dtype).removeprefix("torch.") if result.is_tensor else None,
    }


def restore_metrics(internals: Internals, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Restore the values of :meth:`MetricsMoment.encode` in a new Trainer."""
    device = internals.trainer.strategy.root_device
    for name, tracker in _trackers(module):
        while len(tracker) < state.get("trackers", {}).get(name, 0):
            tracker.increment()
    by_name = dict(torchmetrics_of(module))
    for name, saved in state["metrics"].items():
        metric = by_name.get(name)
        if metric is not None:
            for attribute, value in saved["states"].items():
                moved = [v.to(device) for v in value] if isinstance(value, list) else value.to(device)
                setattr(metric, attribute, moved)
            for attribute, value in saved.get("plain", {}).items():
                setattr(metric, attribute, value.to(device) if isinstance(value, torch.Tensor) else value)
            metric._update_count = saved["updates"]
            metric._computed = None
    results = internals.results
    for key, saved in state["results"].items():
        if not saved["meta"]["is_tensor"] and saved["meta"]["metric_attribute"] not in by_name:
            continue  # the model no longer has it
        results[key] = _decode_result(internals, by_name, type(results), saved, device)
    moved = {
        name: {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in state["connector"][name].items()}
        for name in ("callback", "logged", "progress_bar")
    }
    internals.set_logged({**state["connector"], **moved})


def _decode_result(
    internals: Internals,
    metrics: Mapping[str, Metric],
    collection: type,
    saved: Mapping[str, Any],
    device: torch.device,
) -> Any:
    # builds what self.log() would have created for the same value
    module = sys.modules[collection.__module__]
    meta = saved["meta"]
    place, name = meta["reduce_fx"]
    rebuilt = module._Metadata(
        **{field: meta[field] for field in _META},
        reduce_fx=getattr(sys.modules[place], name),
        dataloader_idx=meta["dataloader_idx"],
        metric_attribute=meta["metric_attribute"],
    )
    should, rank_zero_only, op = meta["sync"]
    rebuilt.sync = module._Sync(
        fn=internals.trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only, _op=op
    )
    result = module._ResultMetric(rebuilt, meta["is_tensor"])
    result.to(device)
    if meta.get("dtype") is not None:  # each epoch starts from the default value
        result._defaults["value"] = result._defaults["value"].to(getattr(torch, meta["dtype"]))
    if meta["is_tensor"]:
        result.value = saved["value"].to(device)
        if saved["weight"] is not None:
            result.cumulated_batch_size = saved["weight"].to(device)
    else:
        result.value = metrics[meta["metric_attribute"]]
    result._forward_cache = saved["last"].to(device) if saved["last"] is not None else None
    result._update_count = saved["updates"]
    result.has_reset = saved["has_reset"]
    result.meta.__class__ = _restored(module._Metadata)
    result.meta.of, result.meta.is_said = result, internals.trainer.is_global_zero
    return result


@functools.cache
def _restored(kind: Any) -> Any:
    """Return a subclass of ``_Metadata`` that takes over the arguments of the script's next ``self.log`` of the value.

    Lightning compares these arguments with those of the call before, and refuses another ``prog_bar``, for example.
    Here, the call before was in another run, and the script may have been changed since.
    """

    class Restored(kind):  # type: ignore[misc]
        of: Any  # the result that has this metadata
        is_said: bool  # whether to warn about changes: on rank 0, for all ranks

        def __eq__(self, now: Any) -> bool:
            if type(now) is not kind:
                return NotImplemented
            result = self.of
            is_as_before = self.reduce_fx is now.reduce_fx and self.metric_attribute == now.metric_attribute
            if is_as_before and self.on_epoch >= now.on_epoch:
                result.meta = now
                return True
            if self.is_said:
                warn(
                    f"this resume is not exact: self.log({self.name!r}) has another reduce_fx, on_epoch or metric than "
                    "when the checkpoint was saved, so its value over this epoch is that of the batches since then "
                    "(log it as before until the epoch is over)",
                    stacklevel=2,
                )
            device = result.device
            type(result).__init__(result, now, now.metric_attribute is None)
            result.to(device)
            return True

        __hash__ = kind.__hash__

        def __reduce__(self) -> tuple[Any, ...]:  # a copy is Lightning's own class
            return kind.__new__, (kind,), {name: vars(self)[name] for name in kind.__dataclass_fields__}

    return Restored
