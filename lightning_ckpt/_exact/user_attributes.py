"""User variables in attributes of module, datamodule and callbacks: captures generators, warns about lost changes.

Attributes are not restored in general: the user may have changed a value on purpose. But the digest of each one that
the run has changed is saved, so that a resume detects whether hooks and ``state_dict`` have restored it. Numbers that
did not exist when training started, and do not at a resume, are restored: code that reads them would fail. So are
values that the source resets again and again, such as the sum of an epoch's losses, or the list of outputs that
Lightning's documentation shows.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric, MetricCollection, MetricTracker

from ckpt_core.state.changed_values import UNREAD, PlainState, fingerprint, holder_of, is_record, small
from ckpt_core.state.code_origin import is_library, place_of
from ckpt_core.state.loader_objects import Carried
from ckpt_core.state.lost_variables import (
    are_kept,
    are_made_once,
    are_put_aside,
    are_set_back,
    are_set_by_hooks,
    in_words,
    setters_of,
)
from ckpt_core.state.object_walk import Found, set_by_libraries
from lightning_ckpt._private.replacing import Live

# other modules capture the state of these
_FOLLOWED = (Dataset, Sampler, DataLoader, Metric, MetricCollection, MetricTracker, Optimizer, LRScheduler)
_HOLDS = ("state_dict", "on_save_checkpoint")
_MODULE = ("module", "datamodule")
_NAMED = 5
_UNKNOWN = object()
_EMPTY = {fingerprint(kind()) for kind in (list, dict, set, deque)}
_SCALARS = (bool, int, float, str, type(None))  # None may stand for a value to come
_NUMBERS = (bool, int, float, type(None))
_FOLLOWED_VALUES = (*_NUMBERS, np.generic, list, torch.Tensor)
_HELD = 1 << 20  # bytes
_CONTAINERS = (list, dict, set, deque)
_ARRAYS = (np.ndarray, np.generic)
_SET_ANEW = (int, float, torch.Tensor, *_ARRAYS)
# what these hooks set counts as set once in a run
_ONCE = """
    prepare_data configure_model configure_optimizers configure_callbacks on_fit_start on_sanity_check_start
    on_sanity_check_end on_train_start on_train_end on_fit_end teardown on_exception on_save_checkpoint
    on_load_checkpoint
"""
_RUN_ONCE = frozenset(_ONCE.split())

_VALIDATION_BEGINS = frozenset({"on_validation_start", "on_validation_epoch_start"})

Digests = dict[str, dict[str, str]]
Place = tuple[str, str]  # an object, and the path to a value that it carries
# The dictionary that a number, tensor or list is in; the value itself; a list's length or a tensor's version
Before = tuple[Any, Any, int]


class UserAttributes(Live):
    """Tracks the attributes of one Trainer's module, datamodule and callbacks of the user's own classes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._owners: dict[str, Any] = {"module": trainer.lightning_module}
        if getattr(trainer, "datamodule", None) is not None:
            self._owners["datamodule"] = trainer.datamodule
        for owner in self._owners.values():
            with contextlib.suppress(Exception):
                owner.hparams  # noqa: B018 - Lightning's save makes it where there is none, also in what data holds
        for number, callback in enumerate(trainer.callbacks):
            if not is_library(type(callback)):
                self._owners[f"callback {number} {type(callback).__name__}"] = callback
        self._plain = {
            name: PlainState(owner, ignore=set_by_libraries(owner.__class__), leave=_FOLLOWED)
            for name, owner in self._owners.items()
        }
        self.generators = Carried(self._owners, plain=False)
        self._at_start: Digests = {}
        self._begun: Digests | None = None  # after the module's own on_train_start; empty in a resumed run
        self._by_hooks: Digests = {}
        self._by_hooks_before: Digests = {}  # the same of the interrupted run
        self._copies: dict[str, dict[str, Any]] = {}
        self._to_come: dict[str, dict[str, Any]] = {}  # saved values in objects that hooks have yet to create
        self._looked_at: set[tuple[str, str, bool]] = set()
        self._put_back: dict[Place, str] = {}  # restored attributes, with the digests of their first values
        self._set_back: dict[Place, bool] = {}  # for attributes that steps have changed: whether the source resets them
        self._followed: dict[Place, tuple[Any, Any]] = {}  # what steps may change: the dictionary it is in, and its key
        self._size = 0
        self._changed: dict[str, list[str]] = {}  # at the last save, including records such as a list of losses

    def digests(self) -> Digests:
        """Return the digests of all plain attributes."""
        return {name: plain.digests() for name, plain in self._plain.items()}

    def values(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return each object with its plain attributes."""
        return [(self._owners[name], plain.values()) for name, plain in self._plain.items()]

    # ---- while training ----------------------------------------------------------------------------------------------

    def training_starts(self) -> None:
        """Take the digests at the start of training: changes from now on are made by training."""
        self.generators.look()
        self._at_start = self.digests()
        self._follow()

    def epoch_began(self, before: Digests) -> None:
        """Note what the hooks of the epoch's start have set; ``before`` are the digests from before them."""
        self.generators.look()
        self._begun = before if self._begun is None else self._begun
        for name, now in self.digests().items():
            made, earlier = self._by_hooks.setdefault(name, {}), before.get(name, {})
            for path, digest in now.items():
                if path in made or earlier.get(path) != digest:
                    made[path] = digest
        self._follow()

    def _follow(self) -> None:
        self._followed = {
            (name, found.path): (found.holder, found.key)
            for name, plain in self._plain.items()
            for found in plain.in_attributes(_FOLLOWED_VALUES)
            if self._set_back.get((name, found.path), True)
        }
        self._size = self._attributes()

    def _attributes(self) -> int:
        return sum(len(vars(owner)) for owner in self._owners.values())

    def now(self) -> dict[Place, Before]:
        """Return the present numbers, lists and tensors that steps may change; called before each batch."""
        if self._attributes() != self._size:
            self._follow()
        before: dict[Place, Before] = {}
        for place, (holder, key) in self._followed.items():
            value = holder.get(key)
            kind = type(value)
            if kind is list:
                before[place] = (holder, value, len(value))
            elif kind in _NUMBERS:
                before[place] = (holder, value, 0)
            elif kind is torch.Tensor and _is_held(value):
                before[place] = (holder, value.detach(), value._version)
            elif isinstance(value, np.generic):
                before[place] = (holder, value, 0)
        return before

    # ---- at a save ---------------------------------------------------------------------------------------------------

    def capture(
        self,
        *,
        in_epoch: bool = True,
        ends: bool = False,
        looks: bool = True,
        names: bool = True,
        again: Mapping[Place, Before] | None = None,
        before: Digests | None = None,
    ) -> tuple[Digests, dict[str, dict[str, Any]]]:
        """Return the digests of attributes that changed since setup, except for records such as a list of losses.

        Also return the small values of attributes that training created, or that the source resets. Once for each other
        attribute, warn if training has changed it and no state holds it. With ``in_epoch``, a resume continues an epoch
        instead of beginning the next one, whose hooks set theirs again; if it ``ends``, no step sets any before that.
        ``again`` is what :meth:`now` returned, and ``before`` the digests, before what a resume repeats. Without
        ``looks``, lists of device tensors are left out: reading waits for the device. Without ``names``, nothing warns.
        """
        found = {name: plain.changed() for name, plain in self._plain.items()}
        changed = {name: {path: digest for path, (digest, _) in of.items()} for name, of in found.items()}
        self._changed = {name: [*of] for name, of in found.items()}
        self._find_reset_attributes(found)
        made_by_steps: dict[str, dict[str, Any]] = {}
        for name, owner in self._owners.items():
            made = {
                path: one.value for path, (_, one) in found[name].items() if self._is_made(name, path, changed[name])
            }
            if again is not None:
                earlier = (before or {}).get(name, {})
                for path in [path for path in made if earlier.get(path) != changed[name][path]]:
                    made[path] = _as_before(found[name][path][1], again.get((name, path)))
                changed[name] |= {path: fingerprint(value) for path, value in made.items() if value is not _UNKNOWN}
            kept = {path for path in made if self._set_back.get((name, path), False)}
            new = {path: small(value, is_kept=path in kept, waits=looks) for path, value in made.items()}
            made_by_steps[name] = {
                path: {**value, "first": self._first(name, path), "made": self._plain[name].made(path)}
                for path, value in new.items()
                if value is not None
            }
            if not names or _holds_state(type(owner)):
                continue
            start, made = self._at_start.get(name, {}), self._by_hooks.get(name, {})
            begun, lost = (self._begun or {}).get(name, {}), []
            for path, digest in changed[name].items():
                by_hooks = path in made or path in self._by_hooks_before.get(name, {})
                if path in made_by_steps[name] or (not looks and path in kept) or (not in_epoch and by_hooks):
                    continue
                look = (name, path, ends and path in new)  # code that reads one that does not exist fails
                is_as_begun = digest in (start.get(path), begun.get(path), made.get(path))
                if not is_as_begun and look not in self._looked_at:
                    self._looked_at.add(look)
                    lost += [] if _is_in_extra_state(owner, path) else [path]
            if lost and self._trainer.is_global_zero:
                values = self._plain[name].values()
                found_lost = [(_kinds(owner, path), path, values.get(path)) for path in lost]
                setters = zip(lost, setters_of(found_lost), strict=True)
                anew = {path: not by.isdisjoint(_VALIDATION_BEGINS) for path, by in setters}
                once = are_made_once(found_lost)  # a resume warns if it makes another value, if not sharded
                if self._trainer.strategy.restore_checkpoint_after_setup:
                    once = [False] * len(found_lost)
                stay = zip(lost, (k and not o for k, o in zip(are_kept(found_lost), once, strict=True)), strict=True)
                named = [path for path, stays in stay if stays or (ends and path in new and not anew[path])]
                self._looked_at.update((name, path, True) for path in named)
                if named:
                    _warn_of(owner, name.partition(" ")[0], named)
        left = {}
        for name, digests in changed.items():
            hooks = self._by_hooks.get(name, {})
            mine = {path: digest for path, digest in digests.items() if hooks.get(path) == digest}
            all_of_it = {**self._plain[name].without_records(digests), **mine}
            left[name] = {path: digest for path, digest in all_of_it.items() if digest != UNREAD}
        return left, made_by_steps

    def data(self) -> Digests:
        """Return the digests of data that module and datamodule had at the start and, unchanged, at the last save."""
        changed = self._changed
        return {name: plain.data(changed.get(name, ())) for name, plain in self._plain.items() if name in _MODULE}

    def not_before(self, before: Digests) -> set[str]:
        """Return the attributes that training had not changed ``before``, by the names that ``Variables`` uses."""
        return {
            f"`{path}` of {type(self._owners[name]).__name__}"
            for name, found in before.items()
            for path, digest in found.items()
            if self._at_start.get(name, {}).get(path) == digest
        }

    def _is_made(self, name: str, path: str, digests: Mapping[str, str]) -> bool:
        """Return whether training, not a hook of an epoch's start, made an attribute or changed one that is reset."""
        owner: Any = self._owners[name]
        start = self._at_start.get(name, {path: ""})
        is_new = path not in start and path in vars(owner) and not hasattr(type(owner), path)
        by_hook = self._by_hooks.get(name, {}).get(path) == digests[path]
        return (is_new or (name, path) in self._put_back or self._set_back.get((name, path), False)) and not by_hook

    def _first(self, name: str, path: str) -> str:
        made = self._by_hooks.get(name, {}).get(path, "")
        if self._set_back.get((name, path), False):  # as on_train_start left it, which runs in a resumed run, too
            made = (self._begun or {}).get(name, {}).get(path, made)
        return self._put_back.get((name, path), self._at_start.get(name, {}).get(path, made))

    def _find_reset_attributes(self, changed: Mapping[str, Mapping[str, tuple[str, Found]]]) -> None:
        """Find attributes that the source resets or sets again and again, whose values are thus not user settings."""
        new = {
            (name, path): found
            for name, values in changed.items()
            for path, (_, found) in values.items()
            if (name, path) not in self._set_back
        }
        values: dict[Place, tuple[tuple[type, type], str, Any, str]] = {}
        for (name, path), found in new.items():
            # a flag may say that something exists which only this process has
            is_kept = isinstance(found.holder, dict) and not self._plain[name].has_opened(found)
            holder = holder_of(self._owners[name], path) if is_kept else None
            if holder is not None and isinstance(found.value, (torch.Tensor, tuple, *_ARRAYS, *_NUMBERS, *_CONTAINERS)):
                kinds = (type(holder), type(self._owners[name]))
                values[name, path] = (kinds, path, found.value, self._first(name, path))
        self._set_back.update(zip(values, are_set_back([*values.values()], but=_RUN_ONCE), strict=True))
        self._set_back.update({place: False for place in new if place not in values})
        self._look_for_set_anew({place: new[place] for place in values if not self._set_back[place]})
        self._followed = {place: where for place, where in self._followed.items() if self._set_back.get(place, True)}

    def _look_for_set_anew(self, changed: Mapping[Place, Found]) -> None:
        """Find numbers that a late hook of a step sets and an early hook of the next uses, e.g. an annealed factor."""
        found = {
            (name, path): one
            for (name, path), one in changed.items()
            if isinstance(one.value, _SET_ANEW)
            and type(one.value) is not bool  # may be a reason to stop, for this process only
            and not self._plain[name].has_opened(one, kinds=(int,))
        }
        values = [(_kinds(self._owners[name], path), path, one.value) for (name, path), one in found.items()]
        self._set_back.update(zip(found, are_set_by_hooks(values, but=_RUN_ONCE), strict=True))

    def set_by_hooks(self) -> Digests:
        """Return the digests of attributes whose values hooks of an epoch's start have changed."""
        names = {*self._by_hooks, *self._by_hooks_before}
        return {name: {**self._by_hooks_before.get(name, {}), **self._by_hooks.get(name, {})} for name in names}

    # ---- at a resume -------------------------------------------------------------------------------------------------

    def resume(self, set_by_hooks: Mapping[str, Mapping[str, str]]) -> None:
        """Take over what :meth:`set_by_hooks` returned at the save."""
        self._by_hooks_before = {name: dict(digests) for name, digests in set_by_hooks.items()}
        self._begun = {}

    def make_again(self, made: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore attributes that training created or filled, unless the script or a state has restored them."""
        for name, values in made.items():
            if name in self._plain:
                owner, now = self._owners[name], self._plain[name].digests()
                missing = {path: value for path, value in values.items() if _lacks(owner, path)}
                for path, value in values.items():
                    if path in now and (now[path] in _EMPTY or _is_first(now[path], value)):
                        missing[path] = {**value, "in_place": True}
                self._plain[name].restore(missing)
                self._put_back |= {(name, path): value.get("first", "") for path, value in missing.items()}
                self._to_come[name] = {path: value for path, value in values.items() if path not in (missing | now)}

    def before_hooks(self, saved: Mapping[str, Mapping[str, str]]) -> None:
        """Copy the attributes that equal the saved ones, before hooks change them."""
        self._copies = {}
        for name, digests in saved.items():
            if name in self._plain:
                now = self._plain[name].digests()
                right = [path for path, digest in digests.items() if now.get(path) == digest]
                right += [path for of, path in self._put_back if of == name]
                self._copies[name] = self._plain[name].copy(right)

    def after_hooks(self) -> None:
        """Restore the copies of :meth:`before_hooks`, and saved values in objects that the hooks have created."""
        for name, values in self._copies.items():
            self._plain[name].restore(values)
        for name, values in self._to_come.items():
            now = self._plain[name].digests()
            made = {
                path: {**v, "in_place": True} for path, v in values.items() if path in now and _is_first(now[path], v)
            }
            self._plain[name].restore(made)
            self._put_back |= {(name, path): value["first"] for path, value in made.items()}
        self._copies, self._to_come = {}, {}

    def other_data(self, saved: Digests) -> str | None:
        """Return which data differs from that with which the run that saved had begun, in words, or ``None``."""
        found: list[tuple[type, str, Any]] = []
        for name, digests in saved.items():
            if name in self._plain:
                plain = self._plain[name]
                now, values, known = plain.digests(), plain.values(), plain.data()
                others = [path for path, digest in digests.items() if path in known and now.get(path, digest) != digest]
                found += [(type(self._owners[name]), path, values[path]) for path in others]
        names = [
            f"{kind.__name__}.{path}" for (kind, path, _), used in zip(found, are_kept(found), strict=True) if used
        ]
        if not names:
            return None
        return (
            f"{in_words(names)} is not that of the run that saved (if it is drawn at each start, set a seed before, or "
            "use a buffer)"
        )

    def differences(
        self,
        saved: Mapping[str, Mapping[str, str]],
        before: Digests | None = None,
        *,
        steps_make_anew: bool = False,
        is_aside: bool = False,
        but: Collection[str] = (),
    ) -> str | None:
        """Return which attributes of module and datamodule differ from the saved ones, in words, or ``None``.

        ``before`` are digests from before the hooks that began the next epoch. Attributes that these have changed do
        not count, nor those that they had set to the present value in the run that saved. But values that they compute
        from earlier values do, also those of callbacks. With ``steps_make_anew``, numbers and strings that, by the
        source, each step only sets do not count; nor do names in ``but``, which are like those of :meth:`not_before`.
        Values put aside for a while count if they may be used when training continues (``is_aside``).
        """
        found: list[tuple[type, str, Any]] = []
        made_of_it: list[tuple[type, str, Any]] = []
        for name, plain in self._plain.items():
            now, values, set_before = plain.digests(), plain.values(), self._by_hooks_before.get(name, {})
            for path, digest in saved.get(name, {}).items():
                value, kind, is_modules = now.get(path), type(self._owners[name]), name in _MODULE
                earlier = value if before is None else before.get(name, {}).get(path)
                is_hooks = before is not None and (earlier != value or set_before.get(path, "") == value)
                one = kind, path, values.get(path, getattr(kind, path, None))
                is_set = set_before.get(path) == digest
                if is_modules and not (is_hooks or (is_set and is_record(one[2]))):
                    found += [one] if value != digest else []
                elif is_set and earlier != digest and (before is None or earlier != value):
                    made_of_it.append(one)
        stay = are_kept(made_of_it)
        if before is not None:
            back = are_set_back([([k], path, v, "") for k, path, v in made_of_it], but=_RUN_ONCE)
            stay = [stays and not anew for stays, anew in zip(stay, back, strict=True)]
        found += [one for one, stays in zip(made_of_it, stay, strict=True) if stays]
        found = [one for one, unused in zip(found, are_put_aside(found), strict=True) if is_aside or not unused]
        # by the attribute's name alone: a submodule's has the name of another class
        found = [one for one in found if not any(name.startswith(f"`{one[1]}` of ") for name in but)]
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


def _is_first(digest: str, made: Mapping[str, Any]) -> bool:
    """Return whether a value is that of the start of training or, without a sanity check, of the object's creation."""
    return digest in (made.get("first"), made.get("made"))


def _as_before(found: Found, before: Before | None) -> Any:
    """Return what a value was before; ``_UNKNOWN``, which is not captured, if that is not known."""
    if before is None:
        return _UNKNOWN
    holder, value, changes = before
    if holder is not found.holder or (isinstance(value, torch.Tensor) and value._version != changes):
        return _UNKNOWN
    if not isinstance(value, list):
        return value
    return value[:changes] if value is found.value and len(value) >= changes else _UNKNOWN


def _is_held(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be referenced: its storage, which it may share with a larger one, is small.

    Inference tensors may not: they have no version that shows whether they were changed.
    """
    is_plain = tensor.layout == torch.strided and not tensor.is_inference()
    return is_plain and tensor.untyped_storage().nbytes() <= _HELD


def _lacks(owner: Any, path: str) -> bool:
    """Return whether an object lacks an attribute of its own; its class may have the initial value."""
    holder, name = holder_of(owner, path), path.rpartition(".")[2]
    own = getattr(holder, "__dict__", None)
    return own is not None and (not hasattr(holder, name) or (hasattr(type(holder), name) and name not in own))


def _kinds(owner: Any, path: str) -> tuple[type, ...]:
    """Return the classes whose code may use the attribute at ``path``: a submodule may have its own file."""
    holder = holder_of(owner, path)
    return (type(owner),) if holder is owner or holder is None else (type(owner), type(holder))


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


def _is_in_extra_state(owner: Any, path: str) -> bool:
    """Return whether a module of the owner that has the attribute puts more than tensors into the ``state_dict``."""
    names = path.split(".")
    holders = [holder_of(owner, ".".join(names[: number + 1])) for number in range(len(names))]
    more = {
        id(one)
        for one in holders
        if isinstance(one, Module) and type(one).get_extra_state is not Module.get_extra_state
    }
    return bool(more) and isinstance(owner, Module) and any(id(module) in more for module in owner.modules())


def _holds_state(kind: type) -> bool:
    for name in _HOLDS:
        if name == "state_dict" and hasattr(kind, "named_parameters"):
            continue  # torch's state_dict, of parameters and buffers
        owner = next(base for base in kind.__mro__ if name in vars(base) or base is object)
        if not is_library(owner):
            return owner is not object
    return False
