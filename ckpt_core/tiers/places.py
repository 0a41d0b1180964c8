"""The two tiers of a run, local directory and upload target, and the mapping of paths between them."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from typing import Any

from ckpt_core.errors import StorageError
from ckpt_core.option_checks import check_count, check_options, check_path, check_two_tiers, or_none
from ckpt_core.paths import StrPath
from ckpt_core.storage import Storage, is_remote, local_path, storage_for

_URL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+)://+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """A fast local directory in which checkpoints are committed, and the URL or directory to which they are uploaded.

    A checkpoint has the same path relative to both, and methods accept either of its two full paths.

    Args:
        local_dir: Directory on a local disk.
        upload_to: URL or directory.
        keep_local: How many of the newest uploaded checkpoints of a directory stay on the local disk; None: all.
        remote: The storage of the uploads; by default, ``upload_to`` decides.

    Raises:
        ValueError: A value is invalid; the message begins with the option's name.

    Examples:
        >>> from ckpt_core.tiers import Tiers
        >>> tiers = Tiers(local_dir="/nvme/run-7", upload_to="s3://bucket/run-7")
        >>> tiers.remote_path("/nvme/run-7/step=5.ckpt")
        's3://bucket/run-7/step=5.ckpt'
        >>> tiers.local_path("s3://bucket/run-7/step=5.ckpt")
        '/nvme/run-7/step=5.ckpt'
    """

    local_dir: str
    upload_to: str
    keep_local: int | None = None
    remote: Storage | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {"local_dir": "a directory", "upload_to": "a URL or directory"}
        check_options({name: functools.partial(check_path, what=what) for name, what in places.items()}, vars(self))
        check_options({"keep_local": or_none(check_count)}, vars(self))
        if is_remote(self.local_dir):
            raise ValueError(f"local_dir must be a directory on a local disk, not {self.local_dir!r}")
        # object.__setattr__, because the dataclass is frozen.
        object.__setattr__(self, "local_dir", _normal(self.local_dir))
        object.__setattr__(self, "upload_to", _normal(self.upload_to))
        for inner, outer in ((self.local_dir, self.upload_to), (self.upload_to, self.local_dir)):
            if _relative(inner, outer) is not None:
                raise ValueError(f"upload_to ({self.upload_to}) and local_dir ({self.local_dir}) must lie apart")

    @classmethod
    def of(
        cls,
        local_dir: StrPath | None,
        upload_to: StrPath | None,
        keep_local: int | None = None,
    ) -> Tiers | None:
        """Return the tiers for a plugin's options; None if they are not set.

        Args:
            local_dir: As for the class, or None.
            upload_to: As for the class, or None.
            keep_local: As for the class.

        Raises:
            ValueError: One of the options is missing or invalid.
        """
        check_two_tiers(local_dir, upload_to, keep_local)
        if local_dir is None:
            return None
        return cls(local_dir=local_dir, upload_to=upload_to, keep_local=keep_local)  # type: ignore[arg-type]

    def covers(self, path: str) -> bool:
        """Return whether ``path`` lies in one of the tiers."""
        return self._relative(path) is not None

    def local_path(self, path: str) -> str:
        """Return where the checkpoint or directory ``path``, of either tier, is on the local disk.

        Raises:
            StorageError: It lies in neither tier.
        """
        return self._joined(self.local_dir, path)

    def remote_path(self, path: str) -> str:
        """Return where the checkpoint or directory ``path``, of either tier, is uploaded to.

        Raises:
            StorageError: It lies in neither tier.
        """
        return self._joined(self.upload_to, path)

    def storage(self, storage_options: dict[str, Any] | None) -> Storage:
        """Return the storage of the uploads.

        Args:
            storage_options: Options for fsspec, if ``upload_to`` is a URL.
        """
        return self.remote or storage_for(self.upload_to, storage_options if is_remote(self.upload_to) else None)

    def _joined(self, root: str, path: str) -> str:
        relative = self._relative(path)
        if relative is None:
            raise StorageError(
                f"the path lies neither below local_dir ({self.local_dir}) nor below upload_to ({self.upload_to})",
                path=path,
                remedy="save below local_dir, or change that option",
            )
        return f"{root}/{relative}" if relative else root

    def _relative(self, path: str) -> str | None:
        normal = _normal(path)
        for root in (self.local_dir, self.upload_to):
            relative = _relative(normal, root)
            if relative is not None:
                return relative
        if is_remote(normal):
            return None
        # Lightning resolves symbolic links before it saves.
        return _relative(os.path.realpath(normal), os.path.realpath(self.local_dir))


def _normal(path: StrPath) -> str:
    text = local_path(path)
    if is_remote(text):
        return _URL.sub(r"\1://", text).rstrip("/")
    return os.path.abspath(os.path.expanduser(text))


def _relative(path: str, root: str) -> str | None:
    if path == root:
        return ""
    prefix = root.rstrip("/") + "/"
    inside = path.removeprefix(prefix)
    if inside == path or ".." in inside.split("/"):
        return None
    return inside
