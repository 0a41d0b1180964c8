"""Builds and validates the names of the files and parts of a directory checkpoint."""

from __future__ import annotations

import re

_PART = re.compile(r"[A-Za-z0-9_]{1,100}")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_SAVE_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
_RESERVED = {"rank", "manifest"}
_LONGEST_COMPONENT = 255
_MOST_COMPONENTS = 20


def shard_name(part: str, suffix: str = "") -> str:
    """Return the name of the file that holds all of a part."""
    return f"{part}{suffix}.safetensors"


def _numbered(name: str, rank: int, world_size: int) -> str:
    return f"{name}-{rank + 1:05d}-of-{world_size:05d}"


def piece_name(part: str, rank: int, world_size: int, suffix: str = "") -> str:
    """Return the name of the file that holds a rank's share of a part."""
    return shard_name(_numbered(part, rank, world_size), suffix)


def frozen_name(part: str, rank: int, world_size: int, suffix: str = "") -> str:
    """Return the name of the file that holds the frozen tensors of a rank's share of a part."""
    return shard_name(f"{_numbered(part, rank, world_size)}-unchanged-1", suffix)


def per_rank_name(rank: int, world_size: int, suffix: str = "") -> str:
    """Return the name of the file that holds the tensors of all per-rank parts of a rank."""
    return shard_name(_numbered("rank", rank, world_size), suffix)


def digests_name(rank: int, world_size: int, suffix: str = "") -> str:
    """Return the name of the file that holds the digests of a rank's files."""
    return f"{_numbered('rank', rank, world_size)}{suffix}.digests"


def with_suffix(name: str, suffix: str) -> str:
    """Return a file's name with a suffix inserted before the extension."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}{suffix}.{ending}"


def check_part_name(name: str) -> None:
    """Raise a ``ValueError`` unless ``name`` can be the name of a part."""
    if _PART.fullmatch(name) is None or name in _RESERVED:
        raise ValueError(
            f"{name!r} cannot be the name of a part: 1 to 100 letters, digits and underscores, but not "
            + " or ".join(sorted(_RESERVED))
        )


def check_save_id(save_id: str) -> None:
    """Raise a ``ValueError`` unless ``save_id`` can be the id of a save."""
    if _SAVE_ID.fullmatch(save_id) is None:
        raise ValueError(f"{save_id[:80]!r} cannot be the id of a save: 1 to 64 letters, digits and dashes")


def check_shard_name(name: str) -> None:
    """Raise a ``ValueError`` unless ``name`` can be the name of one of our files; above all, refuse paths."""
    if _SHARD.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is not the name of a file of tensors")


def check_extra_name(name: str) -> None:
    """Raise a ``ValueError`` for a path that is absolute or leads out of the checkpoint's directory."""
    components = name.split("/")
    plain = all(
        component not in {"", ".", ".."} and len(component.encode("utf-8", "surrogatepass")) <= _LONGEST_COMPONENT
        for component in components
    )
    if not plain or len(components) > _MOST_COMPONENTS or any(c in "\\:" or ord(c) < 32 for c in name):
        raise ValueError(f"{name[:80]!r} is not a relative path inside the checkpoint")
