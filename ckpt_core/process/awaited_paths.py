"""Make accesses to a path wait for its background save, so that a script can use a checkpoint right after saving it.

A background save leaves nothing at its path until it is committed. A script that lists, opens, copies, renames or
deletes the path must not find it missing, and a checkpoint that it deleted must not appear later. So the *access*
waits, and a script that accesses nothing waits for nothing. Two mechanisms together see all accesses made in Python:

- an audit hook (:func:`sys.addaudithook`) sees files opened, directories listed, made, renamed, copied and deleted,
  wherever the function was imported from, and programs started, which may access anything;
- ``os.stat``, ``os.lstat`` and ``os.access``, behind ``os.path.exists``, ``Path.is_dir`` and the like, raise no audit
  event. They are replaced by wrappers that do the same.

Neither can be undone, so both are installed by the first save that needs them. Compiled code that opens files itself
has to call :func:`wait_for`. Accesses by our own packages, by writing threads and by log handlers (whose lock the
writing thread may need) do not wait, nor do those of forked processes, in which no save runs. Where our packages look
for a checkpoint to load, they call :func:`wait_for_saves`: another checkpointer of this process may be saving it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from ckpt_core.process.threads import Latch

# A safeguard against deadlock, in case code that holds a lock which the save needs waits here; none is known.
_LONGEST_WAIT_SECONDS = 600.0

own_packages = {"ckpt_core"}
"""Packages whose accesses do not wait, because they know which saves are under way."""


class _Expected:
    """A path whose save is under way."""

    def __init__(self, path: str, ended: Latch, can_end: Callable[[], bool] = lambda: True) -> None:
        directory, name = os.path.split(_absolute(path))
        self.directory = directory if _is_url(path) else os.path.realpath(directory)
        self.path = os.path.join(self.directory, name)
        self.ended = ended
        self.can_end = can_end

    def is_touched(self, path: str, how: int) -> bool:
        """Return whether an access of the kind ``how`` to ``path`` concerns this path."""
        if path == self.path or path.startswith(self.path + os.sep):
            return True
        if how == _TREE:
            return self.path.startswith(path.rstrip(os.sep) + os.sep)
        return how == _LISTING and path == self.directory


# Kinds of access: it concerns a save at the accessed path or above; or also one in that directory; or all below it.
_ITSELF, _LISTING, _TREE = range(3)
# By audit event: the kind of access, and the positions of the arguments that are paths.
_EVENTS: dict[str, tuple[int, tuple[int, ...]]] = {
    **dict.fromkeys(
        ("open", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime", "os.remove"), (_ITSELF, (0,))
    ),
    **dict.fromkeys(("os.getxattr", "os.listxattr", "os.setxattr"), (_ITSELF, (0,))),
    "os.link": (_ITSELF, (0, 1)),
    "os.symlink": (_ITSELF, (1,)),  # not the target: an access through the link waits
    **dict.fromkeys(("os.listdir", "os.scandir", "os.chdir"), (_LISTING, (0,))),
    **dict.fromkeys(("os.rmdir", "shutil.rmtree"), (_TREE, (0,))),
    **dict.fromkeys(("os.rename", "shutil.copytree", "shutil.move"), (_TREE, (0, 1))),
}
# Events that start a program, which may access any path.
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"})

_MOVES = frozenset({"os.symlink", "os.rename", "os.remove", "os.rmdir"})

_expected: list[_Expected] = []
_saves: list[_Expected] = []  # all saves and removals of this process, for wait_for_saves()
_real: dict[str, str] = {}  # directories and their real paths; cleared when symbolic links may have changed
_thread = threading.local()


def expect(path: str, ended: Latch) -> None:
    """Make accesses to a local path wait until ``ended`` is set; the caller then calls :func:`forget`."""
    _install()
    _real.clear()
    _expected.append(_Expected(path, ended))


def note(path: str, ended: Latch, can_end: Callable[[], bool]) -> None:
    """Make :func:`wait_for_saves` wait for a local path or URL until ``ended`` is set; then call :func:`forget`.

    It does not wait if ``can_end`` returns False: in a signal handler that has interrupted the save.
    """
    _saves.append(_Expected(path, ended, can_end))


def forget(ended: Latch) -> None:
    """Remove the paths that were registered with ``ended``: accesses to them do not wait any more."""
    for items in (_expected, _saves):
        for item in tuple(items):
            if item.ended is ended:
                with contextlib.suppress(ValueError):  # another thread has removed it
                    items.remove(item)


def wait_for_saves(path: str, *, below: bool = False) -> None:
    """Wait until this process has no save under way of the checkpoint at a local path or URL, or in that directory.

    With ``below``, saves at any depth below it count, too. A failure of the save is not raised here.
    """
    if not _saves or getattr(_thread, "is_free", False):
        return
    with without_waiting():
        how = _TREE if below else _LISTING
        names = {_absolute(path)} if _is_url(path) else _names_of(path, how)
        for item in tuple(_saves):
            if any(item.is_touched(name, how) for name in names) and item.can_end():
                item.ended.wait()


def _is_url(path: str) -> bool:
    return "://" in path


def _absolute(path: str) -> str:
    return path.rstrip("/") if _is_url(path) else os.path.abspath(path)


def wait_for(path: Any) -> None:
    """Wait until no save of a path, or of a directory above it, is under way; for wrappers of functions."""
    if _expected:
        _wait(_ITSELF, (path,), caller=sys._getframe(2))


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Let this thread access any path in the body without waiting, because other threads wait for it."""
    before = getattr(_thread, "is_free", False)
    _thread.is_free = True
    try:
        yield
    finally:
        _thread.is_free = before


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _expected:
        return
    if event in _EVENTS:
        how, positions = _EVENTS[event]
        _wait(how, tuple(arguments[at] for at in positions if at < len(arguments)))
        if event in _MOVES:
            _real.clear()
    elif event in _PROGRAMS:
        _wait(_TREE, (os.sep,))
        _real.clear()


def _wait(how: int, paths: tuple[Any, ...], *, caller: types.FrameType | None = None) -> None:
    if getattr(_thread, "is_free", False):
        return
    with without_waiting():
        touched = [name for path in paths for name in _names_of(path, how)]
        concerned = [item for item in list(_expected) if any(item.is_touched(name, how) for name in touched)]
        if not concerned or _is_exempt(caller or sys._getframe(1)):
            return
        end = time.monotonic() + _LONGEST_WAIT_SECONDS
        for item in concerned:
            item.ended.wait(max(0.0, end - time.monotonic()))


def _names_of(path: Any, how: int) -> set[str]:
    """Return the absolute paths that an access to ``path`` concerns: itself and, if it is a link, its target."""
    if path is None and how == _LISTING:
        path = os.curdir
    try:
        directory, name = os.path.split(os.path.abspath(os.fsdecode(path)))  # TypeError for a file descriptor
        if directory not in _real:
            _real[directory] = os.path.realpath(directory)
        full = os.path.join(_real[directory], name)
        return {full, os.path.realpath(full)} if os.path.islink(full) else {full}
    except (TypeError, ValueError, OSError):
        return set()


def _is_exempt(frame: types.FrameType | None) -> bool:
    """Return whether an access does not wait: it comes from one of our packages, or from inside a logging call."""
    caller: str | None = None
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name == "logging":
            return True
        if caller is None and name not in sys.stdlib_module_names and frame.f_globals is not globals():
            caller = name
        frame = frame.f_back
    return caller in own_packages


@functools.cache
def _install() -> None:
    sys.addaudithook(_hook)
    for name in ("stat", "lstat", "access"):
        _replace(name)
    if sys.version_info < (3, 11):  # whose pathlib keeps a reference to os.stat from its import
        setattr(pathlib._NormalAccessor, "stat", staticmethod(os.stat))  # type: ignore[attr-defined]  # noqa: B010


def _replace(name: str) -> None:
    original = getattr(os, name)

    @functools.wraps(original)
    def same(path: Any, *args: Any, **kwargs: Any) -> Any:
        if _expected and kwargs.get("dir_fd") is None:
            _wait(_ITSELF, (path,))
        return original(path, *args, **kwargs)

    same.__module__ = "os"  # so that pickle finds it
    for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if original in supported:
            supported.add(same)
    setattr(os, name, same)


os.register_at_fork(after_in_child=_expected.clear)  # no save runs in a forked process
os.register_at_fork(after_in_child=_saves.clear)
