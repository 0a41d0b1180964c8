"""Names of the files of a directory checkpoint, and which names are refused."""

from __future__ import annotations

import re

__all__ = [
    "check_extra_name",
    "check_part_name",
    "check_save_id",
    "check_shard_name",
    "digests_name",
    "group_name",
    "group_of",
    "per_rank_name",
    "piece_name",
    "shard_name",
    "with_suffix",
]

_PART = re.compile(r"[A-Za-z0-9_]{1,100}")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_GROUP = re.compile(r"-unchanged-([1-9][0-9]{0,5})[-.]")
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


def group_name(part: str, rank: int, world_size: int, group: int, suffix: str = "") -> str:
    """Return the name of the file that holds one group of the tensors that a rank writes of a part; 0: those that change."""
    return shard_name(_numbered(part, rank, world_size) + (f"-unchanged-{group}" if group else ""), suffix)


def group_of(name: str) -> int:
    """Return the number of the group that a file holds, by its name."""
    found = _GROUP.search(name)
    return 0 if found is None else int(found[1])


def per_rank_name(rank: int, world_size: int, suffix: str = "") -> str:
    """Return the name of the file that holds the tensors of all per-rank parts of a rank."""
    return shard_name(_numbered("rank", rank, world_size), suffix)


def digests_name(rank: int, world_size: int, suffix: str = "") -> str:
    """Return the name of the file that holds the digests of a rank's files."""
    return f"{_numbered('rank', rank, world_size)}{suffix}.digests"


def with_suffix(name: str, suffix: str) -> str:
    """Return the name of a file that has a suffix, by the name of one that has none."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}{suffix}.{ending}"


def check_part_name(name: str) -> None:
    """Refuse what cannot be the name of a part.

    Raises:
        ValueError: ``name`` is not made of 1 to 100 letters, digits and underscores, or it is reserved.
    """
    if _PART.fullmatch(name) is None or name in _RESERVED:
        raise ValueError(
            f"{name!r} cannot be the name of a part: 1 to 100 letters, digits and underscores, but not "
            + " or ".join(sorted(_RESERVED))
        )


def check_save_id(save_id: str) -> None:
    """Refuse what cannot be the id of a save.

    Raises:
        ValueError: It is not made of 1 to 64 letters, digits and dashes.
    """
    if _SAVE_ID.fullmatch(save_id) is None:
        raise ValueError(f"{save_id[:80]!r} cannot be the id of a save: 1 to 64 letters, digits and dashes")


def check_shard_name(name: str) -> None:
    """Refuse what cannot be the name of a file of ours: above all, a path.

    Raises:
        ValueError: It is no plain file name.
    """
    if _SHARD.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is no name of a file of tensors")


def check_extra_name(name: str) -> None:
    """Refuse a path that is absolute or leads out of the checkpoint's directory.

    Raises:
        ValueError: It is such a path.
    """
    components = name.split("/")
    plain = all(
        component not in {"", ".", ".."} and len(component.encode("utf-8", "surrogatepass")) <= _LONGEST_COMPONENT
        for component in components
    )
    if not plain or len(components) > _MOST_COMPONENTS or any(c in "\\:" or ord(c) < 32 for c in name):
        raise ValueError(f"{name[:80]!r} is no relative path inside the checkpoint")
