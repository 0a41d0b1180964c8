"""``CheckpointConfig``: the options, their valid values, and their sources (flags, environment variables, a file).

Nothing heavy is imported here: a launched training script may set environment variables before it imports torch and
Accelerate, and they must take effect.
"""

# ruff: noqa: RUF009 - what `_option` returns is a field

from __future__ import annotations

import difflib
import functools
import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from ckpt_core.option_checks import (
    check_count,
    check_mapping,
    check_max_host_bytes,
    check_path,
    check_preemption,
    check_seconds,
    check_share,
    check_signals,
    check_switch,
    check_two_tiers,
    or_none,
)
from ckpt_core.paths import StrPath
from ckpt_core.policies import RULES_IN_WORDS, AnyOf, SaveInterval, rules_of_words

__all__ = ["CheckpointConfig", "OptionError", "nearest"]

Strategy = Literal["sync", "async", "sharded"]
Resume = Literal["auto"]
OnError = Literal["raise", "warn"]
Interval = Literal["auto", "continuous"]
MidAccumulation = Literal["grads", "defer", "error"]

VARIABLE_PREFIX = "ACCELERATE_CKPT_"
FILE_OPTION = "config"


class OptionError(ValueError):
    """An option is unknown or has an invalid value; the message names it and where the value came from."""


class _Kind(NamedTuple):
    """The type of an option's values.

    ``check`` returns the value, or raises a :class:`ValueError` whose message continues the option's name. ``parse``
    converts the text of a flag or a variable; text that it cannot convert is returned for ``check`` to refuse.
    """

    check: Callable[[Any], Any]
    parse: Callable[[str], Any]
    metavar: str


def _choice(literal: Any) -> _Kind:
    choices = get_args(literal)

    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(
                f"must be one of {', '.join(map(repr, choices))}, not {value!r:.80}{nearest(value, choices)}"
            )
        return value

    return _Kind(check, str, "{" + ",".join(choices) + "}")


def _path(what: str, metavar: str) -> _Kind:
    return _Kind(or_none(functools.partial(check_path, what=what)), str, metavar)


def _number(text: str) -> Any:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _check_preempt(value: Any) -> Any:
    if value is None or value is False:
        return None
    if isinstance(value, (str, list, tuple)):
        check_signals(value, "true, or names of signals such as 'SIGTERM,SIGUSR1'")
    elif isinstance(value, Mapping):
        check_preemption(value)
    elif value is not True and not hasattr(value, "signals"):
        raise ValueError(f"must be true, names of signals, or a ckpt_core.preemption.Preemption, not {value!r:.80}")
    return value


def _parse_preempt(text: str) -> Any:
    switched = _switch(text)
    found = _json(text) if isinstance(switched, str) else switched
    return found if isinstance(found, Mapping) else switched


def _check_just_in_time(value: Any) -> bool | float:
    return value if isinstance(value, bool) else check_seconds(value)


def _check_listeners(value: Any) -> tuple[Any, ...]:
    listeners = [name for name in value.replace(" ", "").split(",") if name] if isinstance(value, str) else value
    if not isinstance(listeners, (list, tuple)) or not all(callable(one) or isinstance(one, str) for one in listeners):
        raise ValueError(f"must be a list of functions or of names of classes, not {value!r:.80}")
    return tuple(listeners)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _switch(text: str) -> Any:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower(), text)


# ---- retention, in words: latest=2,every_steps=1000 ------------------------------------------------------------------

_POLICIES = "ckpt_core.policies."


def _parse_retention(text: str) -> Any:
    found = _json(text)
    return found if isinstance(found, Mapping) else text


def _check_retention(value: Any) -> Any:
    if callable(getattr(value, "kept", None)) and not isinstance(value, type):
        return value
    if isinstance(value, str):
        return _from_words(value)
    known = {"class_path", "init_args"}
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str) and set(value) <= known:
        return dict(value)
    raise ValueError(
        "must be a policy such as ckpt_core.policies.KeepLatest(2), 'latest=2', or a mapping with class_path and "
        f"init_args, not {value!r:.80}"
    )


def _from_words(text: str) -> dict[str, Any]:
    policies = [_as_mapping(policy) for _, policy in rules_of_words(text)]
    return policies[0] if len(policies) == 1 else _as_mapping(AnyOf([]), policies=policies)


def _as_mapping(policy: Any, **arguments: Any) -> dict[str, Any]:
    """Return a policy as a mapping of ``class_path`` and ``init_args``, as in YAML."""
    kind = type(policy)
    found = {field.name: getattr(policy, field.name) for field in fields(policy)}
    return {"class_path": f"{_POLICIES}{kind.__name__}", "init_args": {**found, **arguments}}


_COUNT = _Kind(check_count, _number, "N")
_COUNT_OR_ALL = _Kind(or_none(check_count), _number, "N")
_SECONDS = _Kind(check_seconds, _number, "SECONDS")
_SECONDS_OR_NONE = _Kind(or_none(check_seconds), _number, "SECONDS")
_SHARE = _Kind(or_none(check_share), _number, "SHARE")
_SWITCH = _Kind(check_switch, _switch, "{true,false}")
_FILE = _path("the path of a file", "PATH")
_DIRECTORY = _path("a directory", "DIRECTORY")
_MAPPING = _Kind(or_none(check_mapping), _json, "JSON")
_RESUME = _Kind(or_none(_choice(Resume).check), str, "{auto}")
_INTERVAL = _Kind(or_none(_choice(Interval).check), str, "{auto,continuous}")
_PREEMPT = _Kind(_check_preempt, _parse_preempt, "SIGNALS")
_JUST_IN_TIME = _Kind(
    _check_just_in_time,
    lambda text: _switch(text) if isinstance(_switch(text), bool) else _number(text),
    "{true,false,SECONDS}",
)
_LISTENERS = _Kind(_check_listeners, str, "CLASSES")
_RETENTION = _Kind(or_none(_check_retention), _parse_retention, "RULES")


def _option(default: Any, kind: _Kind, summary: str, **settings: Any) -> Any:
    return field(default=default, metadata={"kind": kind, "help": summary}, **settings)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How ``save_state`` saves.

    Args:
        strategy: When ``save_state`` returns. ``"sync"``: when the checkpoint is durable. ``"async"``: when the state
            is copied; needs host memory for ``max_pending`` copies. ``"sharded"``: as ``"async"``; state that all ranks
            share is written in slices by all of them, instead of completely by rank 0.
        wait: ``save_state`` returns only when the checkpoint is durable, whatever the strategy.
        max_pending: How many saves may be pending before the next one waits for the oldest.
        on_error: What to do when a background save fails. ``"raise"``: raise on every rank at its next step.
            ``"warn"``: log and count it.
        mid_accumulation: For a save inside a window of gradient accumulation. ``"grads"`` saves each rank's gradients
            so far, so that the window continues where it was. ``"defer"`` saves when the window is complete.
            ``"error"`` refuses.
        retention: Which checkpoints to keep: a policy of :mod:`ckpt_core.policies`, ``"latest=2,every_steps=1000"``, or
            a mapping with ``class_path`` and ``init_args``. With None, only ``total_limit`` deletes.
        commit_timeout: Seconds to wait for the other ranks' parts of a save before it fails.
        local_dir: Directory on a fast local disk that all ranks see. Checkpoints are committed below it, training
            continues, and rank 0 uploads them from there in the background. Needs ``upload_to``.
        upload_to: URL or directory for the uploads, under the same relative names. ``load_state`` takes the nearest
            intact copy, under the path of either.
        keep_local: How many of the newest uploaded checkpoints of a directory stay in ``local_dir``; None: all.
        storage_options: Passed to fsspec for checkpoints at URLs (``s3://...``): endpoint, credentials and so on.
        allow_pickle: Whether ``load_state`` may run code from a checkpoint. Stock Accelerate pickles registered
            objects, and our checkpoints hold objects that are not plain data as pickles. What ``torch.load`` reads with
            ``weights_only=True`` is loaded in any case.
        resume: With ``"auto"``, ``load_state`` without a directory continues from the newest checkpoint of the run that
            verifies. If there is none, it does nothing, and logs a line. Afterwards, ``accelerator.resumed`` is the
            :class:`ckpt_core.resume.ResumePoint`, or None.
        resume_attempts: After this many starts in a row that ended without a newer checkpoint, ``"auto"`` tries an
            older one first; None: never.
        checkpoint_dir: Directory of the run's checkpoints, or its URL, for scripts without automatic names: where
            ``resume`` looks, and ``preempt`` and ``interval`` save. By default ``checkpoints`` in the project
            directory.
        preempt: What makes all ranks save after the same batch and the program end with ``SystemExit`` when that is
            durable: True (SIGTERM), ``"SIGTERM,SIGUSR1"``, or a :class:`ckpt_core.preemption.Preemption` or a mapping
            of its arguments, with deadlines and notices. The exit status is 128 plus the signal's number, or 75.
        interval: When all ranks save by themselves, after the body of the training loop. ``"auto"``: at the interval
            that loses the least time to saves and failures (Young/Daly), based on measured saves. ``"continuous"``:
            each as soon as the previous one is durable. The checkpoints get the next automatic name. Without automatic
            names, they are ``auto_N`` of step N in ``checkpoint_dir``, and the two newest stay, unless ``retention``
            says otherwise.
        mtbf: For ``"auto"``: mean time between failures of the whole job in seconds; by default as observed.
        max_overhead: For ``"auto"``: the share of the run that saves may take, such as 0.005. Without ``mtbf``, it is
            used in full.
        memory_every_n_steps: In addition to checkpoints, keep a snapshot in the machine's memory, outside the
            processes, every N steps. After a crash, ``load_state()`` takes the newer of both. The last two are kept,
            and deleted when the program has ended. None: no snapshots.
        memory_dir: The directory in memory for the snapshots.
        just_in_time: Whether, when a rank dies under DDP, another rank saves the state of all of them, under the next
            automatic name or as ``checkpoint_N`` in ``checkpoint_dir``, so that the restart repeats at most one step.
            A number: for how many seconds survivors wait for each other (15).
        event_log: A local file to which every event is appended as a line of JSON (:mod:`ckpt_core.events`).
        report: A local file for a page about the run, written at its end (``.png``: a picture, too). Its event log is
            next to it, unless ``event_log`` names another.
        log_metrics: Whether to send the figures of the saves (``checkpoint/stall_seconds``,
            ``checkpoint/share_of_run``, ...) to the trackers, along with what the script passes to ``accelerator.log``;
            those of the last save when it calls ``end_training``. With ``transformers``, they go into the logs of its
            ``Trainer``.
        listeners: Called with every event: functions, or in a flag, variable or file comma-separated names of classes,
            such as ``ckpt_core.listeners.opentelemetry.OpenTelemetryListener``.
        overlap: Whether an asynchronous save of an accelerator's tensors copies parameters and optimizers' state during
            the next forward and backward pass; the device then waits before the next optimizer step. Before anything
            else changes them, call :func:`ckpt_core.wait_staged`; otherwise that save fails.
        max_host_bytes: Most host memory in bytes per process for copies of states; None: as much as they need. A larger
            state passes through in parts, and training waits until the last one is copied (async).
        recorder: Whether each rank records the steps of its optimizers in a small file next to the checkpoints. A
            resumed run compares the steps that it repeats, and reports whether they are equal.

    Raises:
        OptionError: A value is invalid.

    Examples:
        >>> CheckpointConfig(strategy="sharded").max_pending
        1
    """

    strategy: Strategy = _option("async", _choice(Strategy), "when save_state returns, and which ranks write")
    wait: bool = _option(False, _SWITCH, "return from save_state only when the checkpoint is durable")
    max_pending: int = _option(1, _COUNT, "pending saves before the next one waits")
    on_error: OnError = _option("raise", _choice(OnError), "what to do when a background save fails")
    mid_accumulation: MidAccumulation = _option(
        "grads", _choice(MidAccumulation), "how a save between two optimizer steps treats the gradients so far"
    )
    commit_timeout: float = _option(600.0, _SECONDS, "how long a save waits for the parts of the other ranks")
    retention: Any = _option(
        None, _RETENTION, f"what to keep: {', '.join(RULES_IN_WORDS)}, as in latest=2,best=loss", hash=False
    )
    local_dir: str | None = _option(
        None, _DIRECTORY, "fast local directory to commit below before uploading; needs upload_to"
    )
    upload_to: str | None = _option(
        None, _DIRECTORY, "URL or directory to upload to in the background; needs local_dir"
    )
    keep_local: int | None = _option(
        None, _COUNT_OR_ALL, "newest uploaded checkpoints that stay in local_dir (default: all)"
    )
    # Not in the repr: credentials must not appear in logs.
    storage_options: dict[str, Any] | None = _option(
        None, _MAPPING, "passed to fsspec for checkpoints at URLs", repr=False, hash=False
    )
    allow_pickle: bool = _option(False, _SWITCH, "let load_state run code from pickles in checkpoints")
    resume: Resume | None = _option(
        None,
        _RESUME,
        "auto: load_state without a directory takes the newest that verifies, or starts from the beginning",
    )
    resume_attempts: int | None = _option(
        3, _COUNT_OR_ALL, "starts in a row without a newer checkpoint after which auto tries an older one first"
    )
    checkpoint_dir: str | None = _option(
        None, _DIRECTORY, "where auto looks, preempt and interval save (default: checkpoints in project_dir)"
    )
    preempt: Any = _option(
        None, _PREEMPT, "true, or signals such as SIGTERM,SIGUSR1, on which all ranks save and the run ends", hash=False
    )
    interval: Interval | None = _option(
        None, _INTERVAL, "save by itself: auto, as often as cost and failures suggest; continuous, one after the other"
    )
    mtbf: float | None = _option(None, _SECONDS_OR_NONE, "time between failures for interval auto (default: observed)")
    max_overhead: float | None = _option(
        None, _SHARE, "share of the run that saves may take for interval auto, such as 0.005"
    )
    memory_every_n_steps: int | None = _option(
        None, _COUNT_OR_ALL, "steps between snapshots in memory, which survive a crash of the processes (default: none)"
    )
    memory_dir: str = _option("/dev/shm", _DIRECTORY, "directory in memory for the snapshots")
    just_in_time: bool | float = _option(
        False, _JUST_IN_TIME, "when a rank dies under DDP, let another rank save what all of them held"
    )
    event_log: str | None = _option(None, _FILE, "file to which every event is appended as a line of JSON")
    report: str | None = _option(
        None, _FILE, "file to which a page about the run is written at its end (.png: a picture, too)"
    )
    log_metrics: bool = _option(False, _SWITCH, "send the figures of each save to the trackers")
    listeners: Any = _option(
        (), _LISTENERS, "comma-separated names of classes that are called with every event", hash=False
    )
    overlap: bool = _option(
        False, _SWITCH, "let an accelerator copy during the next step; wait_staged() before other changes"
    )
    max_host_bytes: int | None = _option(
        None,
        _COUNT_OR_ALL,
        "most host memory in bytes for copies of states; larger ones pass through it (default: any)",
    )
    recorder: bool = _option(True, _SWITCH, "record each step, and report after a resume whether it was exact")

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            # The only way to set a field of a frozen class: a path becomes a string, an int of seconds a float.
            object.__setattr__(self, name, _checked(name, kind, getattr(self, name)))
        try:
            check_two_tiers(self.local_dir, self.upload_to, self.keep_local)
            SaveInterval.of(self.interval, self.mtbf, self.max_overhead)
            check_max_host_bytes(self.max_host_bytes, self.max_pending)
        except ValueError as error:
            raise OptionError(str(error)) from None

    @property
    def is_async(self) -> bool:
        """Whether ``save_state`` returns before the checkpoint is durable."""
        return self.strategy != "sync" and not self.wait

    def made_listeners(self) -> list[Any]:
        """Return the listeners, creating those that are given as names of classes.

        Raises:
            OptionError: There is no such class.
        """
        return [_made(listener) if isinstance(listener, str) else listener for listener in self.listeners]

    @property
    def slices_replicated(self) -> bool:
        """Whether each rank writes a slice of the state that all ranks share."""
        return self.strategy == "sharded"

    @classmethod
    def from_sources(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        variables: Mapping[str, str] | None = None,
        flag_name: str = "--{}",
    ) -> CheckpointConfig:
        """Collect the options: flags override variables, which override the file, which overrides the defaults.

        Args:
            flags: Values by option, as text or already converted; None counts as not set. ``config`` is the YAML file,
                a mapping of options to values.
            variables: The environment; by default that of this process. ``ACCELERATE_CKPT_<OPTION>`` is read, and
                ``ACCELERATE_CKPT_CONFIG`` for the file. Empty variables count as not set.
            flag_name: Format string that makes the name of a flag, for errors.

        Raises:
            OptionError: An option is unknown or has an invalid value, or the file cannot be read. The message begins
                with the flag, the variable, or the file and key.

        Examples:
            >>> CheckpointConfig.from_sources({"strategy": "sync"}, variables={"ACCELERATE_CKPT_MAX_PENDING": "2"})
            CheckpointConfig(strategy='sync', wait=False, max_pending=2, on_error='raise', mid_accumulation='grads', \
commit_timeout=600.0, retention=None, local_dir=None, upload_to=None, keep_local=None, allow_pickle=False, \
resume=None, resume_attempts=3, checkpoint_dir=None, preempt=None, interval=None, mtbf=None, \
max_overhead=None, memory_every_n_steps=None, memory_dir='/dev/shm', \
just_in_time=False, event_log=None, report=None, log_metrics=False, listeners=(), overlap=False, \
max_host_bytes=None, recorder=True)
        """
        environment = os.environ if variables is None else variables
        given_flags = {flag_name.format(name): (name, value) for name, value in (flags or {}).items()}
        given_variables = {
            name: (name.removeprefix(VARIABLE_PREFIX).lower(), text)
            for name, text in environment.items()
            if name.startswith(VARIABLE_PREFIX) and text
        }
        values: dict[str, Any] = {}
        file: tuple[str, Any] | None = None
        for given in (given_variables, given_flags):  # the later wins
            for origin, (name, value) in given.items():
                if value is None:
                    continue
                if name == FILE_OPTION:
                    file = origin, value
                else:
                    values[name] = _from_source(origin, name, value)
        return cls(**({} if file is None else _read_file(*file)) | values)


def _kinds() -> dict[str, _Kind]:
    return {option.name: option.metadata["kind"] for option in fields(CheckpointConfig)}


def _checked(name: str, kind: _Kind, value: Any, origin: str | None = None) -> Any:
    try:
        return kind.check(value)
    except ValueError as error:
        raise OptionError(f"{name} {error}" if origin is None else f"{origin}: {name} {error}") from None


def _from_source(origin: str, name: str, value: Any) -> Any:
    kinds = _kinds()
    if name not in kinds:
        raise OptionError(f"{origin}: there is no option {name!r}{nearest(name, [*kinds, FILE_OPTION])}")
    return _checked(name, kinds[name], kinds[name].parse(value) if isinstance(value, str) else value, origin)


def _made(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"listeners: there is no {name!r}: {error}") from error


def _read_file(origin: str, path: StrPath) -> dict[str, Any]:
    import yaml  # comes with Accelerate

    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"{origin}: {FILE_OPTION} must be the path of a YAML file, not {path!r:.80}")
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"{origin}: {os.fspath(path)} cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"{os.fspath(path)}: must map options to values, and is a {type(content).__name__}")
    kinds = _kinds()
    for key in content:
        if key not in kinds:
            raise OptionError(f"{os.fspath(path)}:{key}: there is no option {key!r}{nearest(key, kinds)}")
    return {key: _checked(key, kinds[key], value, origin=f"{os.fspath(path)}:{key}") for key, value in content.items()}


def nearest(wrong: Any, known: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for the known name closest to the wrong one, or nothing."""
    close = difflib.get_close_matches(str(wrong), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
