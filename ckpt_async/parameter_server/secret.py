"""The shared secret of a training's processes: where it is found, and the proof that a process knows it."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ckpt_core.errors import CheckpointError, StorageError
from ckpt_core.paths import StrPath

SECRET_VARIABLE, FILE_VARIABLE = "CKPT_SECRET", "CKPT_SECRET_FILE"
_SHORTEST = 16  # bytes
_HOW_TO_SHARE = (
    f"give every process the same secret=, {SECRET_VARIABLE} or {FILE_VARIABLE} (a file that only its owner can read); "
    'python -c "import secrets; print(secrets.token_hex(32))" makes one'
)


class Secret:
    """A shared secret of random bytes; ``origin`` describes its source, for messages."""

    def __init__(self, value: bytes, origin: str) -> None:
        if len(value) < _SHORTEST:
            raise CheckpointError(
                f"the secret {origin} has {len(value)} bytes, and {_SHORTEST} are the least", remedy=_HOW_TO_SHARE
            )
        self.origin = origin
        self._value = value

    def proof(self, role: bytes, listener: bytes, caller: bytes) -> bytes:
        """Return the proof that a side knows the secret: a digest of 32 bytes, over the random numbers of both sides.

        It depends on the role, so that a side's own proof cannot be sent back to it.
        """
        return hmac.digest(self._value, role + listener + caller, "sha256")


def find_secret(given: StrPath | None, *, address: str, is_loopback: bool) -> Secret:
    """Return the secret to use: ``given`` as text, or the contents of the file if it is a path.

    By default, the value of ``CKPT_SECRET`` or the contents of the file ``CKPT_SECRET_FILE``. Without these, if the
    process listens on the loopback interface, a file that all processes of the user share, and that is created here.
    ``address`` is where the process listens, for messages.
    """
    if isinstance(given, str):
        return Secret(given.strip().encode(), "in secret=")
    if given is None and os.environ.get(SECRET_VARIABLE):
        return Secret(os.environ[SECRET_VARIABLE].strip().encode(), f"in {SECRET_VARIABLE}")
    file = given or os.environ.get(FILE_VARIABLE)
    if file is not None:
        return Secret(_read(file), f"in {os.fspath(file)}")
    if not is_loopback:
        raise CheckpointError(
            f"other machines can connect to {address}, and there is no secret that keeps strangers out",
            remedy=_HOW_TO_SHARE,
        )
    return _of_this_user()


def _read(file: StrPath) -> bytes:
    try:
        return Path(file).read_bytes().strip()
    except OSError as error:
        raise StorageError(
            f"the secret cannot be read: {error}", path=os.fspath(file), remedy=_HOW_TO_SHARE, errno=error.errno
        ) from error


def _of_this_user() -> Secret:
    reasons = []
    for directory in _directories():
        file = directory / "parameter_server_secret"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(directory)
            with contextlib.suppress(FileExistsError):
                _make(file)
            _check_owner(file)
            return Secret(_read(file), f"in {file}")
        except OSError as error:
            reasons.append(f"{file}: {error}")
    raise CheckpointError(
        f"no file for a secret that only this user can read: {'; '.join(reasons)}", remedy=_HOW_TO_SHARE
    )


def _directories() -> Iterator[Path]:
    """Yield the directories in which the user's secret may be: of persistent program state, or else below /tmp."""
    with contextlib.suppress(RuntimeError):  # there is no home
        yield Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ckpt"
    yield Path(tempfile.gettempdir()) / f"ckpt-{os.getuid()}"


def _make(file: Path) -> None:
    """Create a new secret atomically, so that if several processes do so at once, one of them wins."""
    if file.exists():
        return
    descriptor, temporary = tempfile.mkstemp(dir=file.parent)  # only its owner can read it
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_hex(32))
        os.link(temporary, file)
    finally:
        os.unlink(temporary)


def _check_owner(path: Path) -> None:
    status = path.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH if stat.S_ISDIR(status.st_mode) else stat.S_IRWXG | stat.S_IRWXO
    if status.st_uid != os.geteuid() or status.st_mode & others or stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} must belong to user {os.geteuid()} and be closed to others")
