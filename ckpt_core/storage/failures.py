"""Translate errors of disks and object stores into ``StorageError``, with a remedy and without credentials."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError

Describe = Callable[[Exception], CheckpointError]

_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas|signature|connection_string|auth", re.IGNORECASE)
_SECRET_PART = re.compile(r"(?:AccountKey|SharedAccessSignature|Password)=([^;]+)", re.IGNORECASE)
_USER_INFO = re.compile(r"(://)[^/@\s]*:[^/@\s]*@")
_SIGNED_PARAMETER = re.compile(
    r"(?i)\b((?:sig|signature|x-amz-signature|x-amz-credential|x-amz-security-token|access_token)=)[^&\s'\"]+"
)
_SHORTEST = 6  # characters; hiding shorter ones would make the text unreadable, and they are not secrets
_HIDDEN = "***"


class Secrets:
    """The credentials in ``storage_options``, to be hidden in texts: strings under names that suggest a credential."""

    def __init__(self, storage_options: Mapping[str, Any]) -> None:
        found = {text for text in _secret_texts(storage_options, secret=False) if len(text) >= _SHORTEST}
        # Longest first, because one may contain another.
        self._texts = sorted(found | {quote(text, safe="") for text in found}, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return ``text`` without credentials, including those in URLs."""
        for secret in self._texts:
            text = text.replace(secret, _HIDDEN)
        return _SIGNED_PARAMETER.sub(rf"\1{_HIDDEN}", _USER_INFO.sub(rf"\1{_HIDDEN}@", text))

    def occur_in(self, error: BaseException) -> bool:
        """Return whether ``error``, or its cause or context, would show a credential when printed."""
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            text = f"{link!r} {link}"
            if self.hide(text) != text:
                return True
            link = link.__cause__ or link.__context__
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_HIDDEN})"


def _secret_texts(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secret_texts(inner, secret=secret or bool(_SECRET_NAME.search(str(name))))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _secret_texts(inner, secret=secret)
    elif secret and isinstance(value, str):
        yield value
        yield from _SECRET_PART.findall(value)


# ---- stores ----------------------------------------------------------------------------------------------------------


def describer(secrets: Secrets, action: str, path: str) -> Describe:
    """Return a function that turns a client's error into one for the user, with the action (``"read"``) and the URL."""
    shown = secrets.hide(path)

    def describe(error: Exception) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        failure: CheckpointError
        if isinstance(error, FileNotFoundError) and action not in ("write", "commit"):
            failure = CheckpointNotFoundError(f"Checkpoint file not found: {shown}", path=shown)
        else:
            failure = StorageError(
                f"cannot {action} the checkpoint: {type(error).__name__}: {secrets.hide(_text_of(error))}",
                path=shown,
                remedy="check the URL, the credentials and the storage_options",
                errno=getattr(error, "errno", None),
            )
        failure.__cause__ = None if secrets.occur_in(error) else error
        return failure

    return describe


def _text_of(error: Exception) -> str:
    return str(error).partition("\n\nDebug source:")[0]  # obstore appends the Rust error, for debugging


@contextlib.contextmanager
def translated(describe: Describe) -> Iterator[None]:
    """Replace an exception raised in the body by the one that ``describe`` returns for it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, outside of this handler, so that Python does not chain it
        failure = describe(error)
    else:
        return
    raise failure


# ---- local disks -----------------------------------------------------------------------------------------------------

_REMEDIES = {
    errno.ENOSPC: "free some space, keep fewer checkpoints, or save to another disk",
    errno.EDQUOT: "your disk quota is used up: delete something or save to another disk",
    errno.EROFS: "the filesystem is mounted read-only: save to another directory",
    errno.EACCES: "the user of this process may not: change the permissions or the path",
    errno.EPERM: "the user of this process may not: change the permissions or the path",
    errno.EIO: "the disk reports an error: check it, and save to another one",
    errno.EISDIR: "there is a directory of that name: choose another path or delete it",
    errno.ENOTDIR: "a part of the path is a file: check the path",
    errno.EEXIST: "a part of the path is a file: check the path",
    errno.ENOENT: "its directory was deleted, or cannot be made: check the path",
    errno.ELOOP: "a link in the path leads to itself: check the path",
    errno.ESTALE: "the filesystem is gone: mount it again",
    errno.ENOTCONN: "the filesystem is gone: mount it again",
    errno.EFBIG: "a file may not grow that large here: raise the limit (ulimit -f), or save to another filesystem",
    errno.EMFILE: "this process has too many files open: close some, or raise the limit (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter file name",
    errno.ECONNRESET: "the storage broke the connection: check the network and that it is up, then save again",
    errno.ETIMEDOUT: "the storage does not answer: check the network and that it is up, then save again",
}


def storage_error(action: str, path: str, error: OSError, needed: int | None = None) -> StorageError:
    """Return the error for the user for an operating system's ``error``, with a remedy if one is known."""
    detail = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0)
    if error.errno == errno.ENOSPC:
        status = os.statvfs(existing_directory(os.path.dirname(os.path.abspath(path))))
        if status.f_files and not status.f_favail:
            detail, remedy = f"{detail}: all {status.f_files} inodes are used", "delete files, of whatever size"
        elif needed is not None:
            detail += f": {needed} bytes needed, {status.f_bavail * status.f_frsize} free"
    return StorageError(
        f"cannot {action} the checkpoint: {detail}",
        path=path,
        remedy=remedy,
        errno=error.errno,
    )


def existing_directory(path: str) -> str:
    """Return ``path`` if it is a directory, or else its nearest parent that is one."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
