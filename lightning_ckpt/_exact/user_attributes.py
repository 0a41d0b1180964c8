"""What module, datamodule and callbacks keep in their attributes: generators are captured, lost changes are named.

Attributes themselves are not put back: a user may have meant another value. But each one that the run has changed is
remembered by a digest, so that a resume knows whether hooks and ``state_dict`` have brought it back. Numbers that were
not there when training started, and are not at a resume, are put back: what reads them would fail. So are those in
lists and dictionaries that were empty then and that the source empties again, as the list of an epoch's losses that
Lightning's documentation shows.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric, MetricCollection, MetricTracker

from ckpt_core.state.changed_values import PlainState, fingerprint, small
from ckpt_core.state.code_origin import is_library, place_of
from ckpt_core.state.loader_objects import Carried
from ckpt_core.state.lost_variables import are_emptied, are_kept, in_words
from ckpt_core.state.object_walk import set_by_libraries
from lightning_ckpt._private.replacing import Live

# their state is captured by others
_FOLLOWED = (Dataset, Sampler, DataLoader, Metric, MetricCollection, MetricTracker, Optimizer, LRScheduler)
_HOLDS = ("state_dict", "on_save_checkpoint")
_MODULE = ("module", "datamodule")
_NAMED = 5
_UNKNOWN = object()
_EMPTY = {fingerprint(kind()) for kind in (list, dict, set, deque)}
_SCALARS = (bool, int, float, str, type(None))  # None also for what there is not yet

Digests = dict[str, dict[str, str]]


class UsersObjects(Live):
    """Module, datamodule and callbacks of one Trainer, as far as their classes are the user's."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._owners: dict[str, Any] = {"module": trainer.lightning_module}
        if getattr(trainer, "datamodule", None) is not None:
            self._owners["datamodule"] = trainer.datamodule
        for number, callback in enumerate(trainer.callbacks):
            if not is_library(type(callback)):
                self._owners[f"callback {number} {type(callback).__name__}"] = callback
        self._plain = {
            name: PlainState(owner, ignore=set_by_libraries(owner.__class__), leave=_FOLLOWED)
            for name, owner in self._owners.items()
        }
        self.generators = Carried(self._owners, plain=False)
        self._at_start: Digests = {}
        self._by_hooks: Digests = {}
        self._by_hooks_before: Digests = {}  # in the run that is resumed from
        self._copies: dict[str, dict[str, Any]] = {}
        self._looked_at: set[tuple[str, str, bool]] = set()
        self._put_back: set[tuple[str, str]] = set()
        self._emptied: dict[tuple[str, str], bool] = {}  # whether the source empties it, for those steps have filled
        self._lists: list[tuple[str, str]] = []  # those that steps may fill

    def digests(self) -> Digests:
        """Return the digests of all plain attributes."""
        return {name: plain.digests() for name, plain in self._plain.items()}

    def values(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return each object with its plain attributes."""
        return [(self._owners[name], plain.values()) for name, plain in self._plain.items()]

    # ---- while training ----------------------------------------------------------------------------------------------

    def training_starts(self) -> None:
        """What changes from now on is changed by training."""
        self.generators.look()
        self._at_start = self.digests()
        self._look_for_lists()

    def epoch_began(self, before: Digests) -> None:
        """The hooks of the epoch's start have run; ``before`` are the digests from before them."""
        self.generators.look()
        for name, now in self.digests().items():
            made, earlier = self._by_hooks.setdefault(name, {}), before.get(name, {})
            for path, digest in now.items():
                if path in made or earlier.get(path) != digest:
                    made[path] = digest
        self._look_for_lists()

    def _look_for_lists(self) -> None:
        places = {(name, path) for name, found in self._at_start.items() for path in found if found[path] in _EMPTY}
        places |= self._put_back | {(name, path) for name, found in self._by_hooks.items() for path in found}
        self._lists = [(name, path) for name, path in places if type(vars(self._owners[name]).get(path)) is list]

    def lengths(self) -> dict[tuple[str, str], int]:
        """Return how many items there are now in the lists that steps may fill."""
        values = {(name, path): vars(self._owners[name]).get(path) for name, path in self._lists}
        return {place: len(value) for place, value in values.items() if type(value) is list}

    # ---- at a save ---------------------------------------------------------------------------------------------------

    def capture(
        self,
        *,
        in_epoch: bool = True,
        ends: bool = False,
        lengths: Mapping[tuple[str, str], int] | None = None,
        before: Digests | None = None,
    ) -> tuple[Digests, dict[str, dict[str, Any]]]:
        """Return the digests of what has changed since the objects were set up, without lists that only tell.

        Also return the attributes that training made, as far as they are numbers. What training has changed and no
        state holds is named, once. With ``in_epoch``, a resume continues an epoch, and does not begin the next one,
        whose hooks set anew what they have set; if the epoch ``ends``, no step sets anything before that. ``lengths``
        are those of lists ``before`` what a resume does again; what other containers had then is known if they have it
        now.
        """
        changed = {name: plain.changed() for name, plain in self._plain.items()}
        self._look_for_filled(changed)
        made_by_steps: dict[str, dict[str, Any]] = {}
        for name, owner in self._owners.items():
            made = {path: vars(owner)[path] for path in changed[name] if self._is_new(name, path, changed[name])}
            if lengths is not None:
                same = {
                    path for path, digest in (before or {}).get(name, {}).items() if digest == changed[name].get(path)
                }
                made = {p: v if p in same else _cut(v, lengths.get((name, p))) for p, v in made.items()}
                changed[name] |= {path: fingerprint(value) for path, value in made.items() if value is not _UNKNOWN}
            new = {path: small(value) for path, value in made.items()}
            made_by_steps[name] = {path: value for path, value in new.items() if value is not None}
            if _holds_state(type(owner)):
                continue
            start, made = self._at_start.get(name, {}), self._by_hooks.get(name, {})
            lost = []
            for path, digest in changed[name].items():
                by_hooks = path in made or path in self._by_hooks_before.get(name, {})
                if path in made_by_steps[name] or (not in_epoch and by_hooks):
                    continue
                look = (name, path, ends and path in new)  # whatever reads one that is not there fails
                if start.get(path) != digest and made.get(path) != digest and look not in self._looked_at:
                    self._looked_at.add(look)
                    lost.append(path)
            if lost and self._trainer.is_global_zero:
                values = self._plain[name].values()
                kept = are_kept([(type(owner), path, values.get(path)) for path in lost])
                named = [path for path, is_kept in zip(lost, kept, strict=True) if is_kept or (ends and path in new)]
                self._looked_at.update((name, path, True) for path in named)
                if named:
                    _warn_of(owner, name.partition(" ")[0], named)
        left = {name: self._plain[name].without_records(digests) for name, digests in changed.items()}
        return left, made_by_steps

    def not_before(self, before: Digests) -> set[str]:
        """Return the places of what training had not changed ``before``, as ``Variables`` calls them."""
        return {
            f"`{path}` of {type(self._owners[name]).__name__}"
            for name, found in before.items()
            for path, digest in found.items()
            if self._at_start.get(name, {}).get(path) == digest
        }

    def _is_new(self, name: str, path: str, digests: Mapping[str, str]) -> bool:
        """Whether training made an attribute, or filled it, and not a hook of the epoch's start alone."""
        owner: Any = self._owners[name]
        start = self._at_start.get(name, {path: ""})
        was_there = path in start and (name, path) not in self._put_back and not self._emptied.get((name, path))
        by_hook = self._by_hooks.get(name, {}).get(path) == digests[path]
        return path in vars(owner) and not (was_there or by_hook or hasattr(type(owner), path))

    def _look_for_filled(self, changed: Digests) -> None:
        """Find out which containers that began empty something empties again; other lists may be records."""
        values = {
            (name, path): vars(self._owners[name]).get(path)
            for name, digests in changed.items()
            for path in digests
            if self._at_start.get(name, {}).get(path) in _EMPTY and (name, path) not in self._emptied
        }
        values = {place: value for place, value in values.items() if isinstance(value, (list, dict, set, deque))}
        emptied = are_emptied([(type(self._owners[name]), path, value) for (name, path), value in values.items()])
        self._emptied.update(zip(values, emptied, strict=True))

    def set_by_hooks(self) -> Digests:
        """Return the digests of what hooks of an epoch's start have set to another value than it had."""
        names = {*self._by_hooks, *self._by_hooks_before}
        return {name: {**self._by_hooks_before.get(name, {}), **self._by_hooks.get(name, {})} for name in names}

    # ---- at a resume -------------------------------------------------------------------------------------------------

    def resume(self, set_by_hooks: Mapping[str, Mapping[str, str]]) -> None:
        """Know what :meth:`set_by_hooks` returned when it was saved."""
        self._by_hooks_before = {name: dict(digests) for name, digests in set_by_hooks.items()}

    def make_again(self, made: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back the attributes that training made or filled, and that neither the script nor a state has again."""
        for name, values in made.items():
            if name in self._plain:
                owner, now = self._owners[name], self._plain[name].digests()
                missing = {path: value for path, value in values.items() if not hasattr(owner, path)}
                missing |= {path: {**values[path], "in_place": True} for path in values if now.get(path) in _EMPTY}
                self._plain[name].restore(missing)
                self._put_back.update((name, path) for path in missing)

    def before_hooks(self, saved: Mapping[str, Mapping[str, str]]) -> None:
        """Remember what a checkpoint has brought back, before hooks change it again."""
        self._copies = {}
        for name, digests in saved.items():
            if name in self._plain:
                now = self._plain[name].digests()
                right = [path for path, digest in digests.items() if now.get(path) == digest]
                right += [path for of, path in self._put_back if of == name]
                self._copies[name] = self._plain[name].copy(right)

    def after_hooks(self) -> None:
        """Put back what was as it was saved."""
        for name, values in self._copies.items():
            self._plain[name].restore(values)
        self._copies = {}

    def differences(
        self, saved: Mapping[str, Mapping[str, str]], before: Digests | None = None, *, steps_make_anew: bool = False
    ) -> str | None:
        """Return what of module and datamodule is not as it was saved, in words, or ``None``.

        ``before`` are digests from before hooks that began the next epoch: what they have changed is theirs, and what
        they had set in the run that saved to the value that it has. With
        ``steps_make_anew``, numbers and texts do not count that, by the source, each step only sets.
        """
        found: list[tuple[type, str, Any]] = []
        for name in _MODULE:
            if name not in self._plain:
                continue
            now, values = self._plain[name].digests(), self._plain[name].values()
            for path, digest in saved.get(name, {}).items():
                value, set_before = now.get(path), self._by_hooks_before.get(name, {})
                is_as_set = path in set_before and set_before[path] == value
                by_hooks = before is not None and (before.get(name, {}).get(path) != value or is_as_set)
                if now.get(path) != digest and not by_hooks:
                    value = values.get(path, getattr(type(self._owners[name]), path, None))
                    found.append((type(self._owners[name]), path, value))
        set_only = [one for one in found if steps_make_anew and isinstance(one[2], _SCALARS)]
        kept = dict(zip(map(id, set_only), are_kept(set_only), strict=True))
        names = [f"{kind.__name__}.{path}" for one in found for kind, path, _ in [one] if kept.get(id(one), True)]
        return (
            None
            if not names
            else (
                f"training had changed {in_words(names)}, but no state holds it (use a buffer, or "
                "on_save_checkpoint and on_load_checkpoint)"
            )
        )


def _cut(value: Any, length: int | None) -> Any:
    """Return what a value was when a list had ``length`` items; something that is not captured if it is not known."""
    if not isinstance(value, (list, dict, set, deque)):
        return value
    return value[:length] if isinstance(value, list) and length is not None and len(value) >= length else _UNKNOWN


def _warn_of(owner: Any, kind: str, paths: list[str]) -> None:
    shown = ", ".join(f"`{path}`" for path in paths[:_NAMED]) + (" and more" if len(paths) > _NAMED else "")
    remedy = "register buffers, or override on_save_checkpoint" if kind == "module" else "give it state_dict"
    has = "no on_save_checkpoint" if kind == "module" else "no state_dict"
    cls: Any = type(owner)
    file, line = place_of(cls) or (cls.__module__, 1)
    warnings.warn_explicit(
        f"{kind} `{cls.__name__}` changed {shown} since the start, and has {has}: a resume will not have it ({remedy})",
        UserWarning,
        file,
        line,
        module=cls.__module__,
    )


def _holds_state(kind: type) -> bool:
    for name in _HOLDS:
        if name == "state_dict" and hasattr(kind, "named_parameters"):
            continue  # of parameters and buffers
        owner = next(base for base in kind.__mro__ if name in vars(base) or base is object)
        if not is_library(owner):
            return owner is not object
    return False
