"""The ranks' reports become the manifest; files of others become a line in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_core._layouts.sharded.manifest import MANIFEST_NAME, ExtraFile, encode_manifest
from ckpt_core._layouts.sharded.plain import encode_plain
from ckpt_core.commit_time import NO_STAMP, Stamp
from ckpt_core.digest import digest_of_parts
from ckpt_core.errors import CheckpointError, SerializationError
from ckpt_core.storage.base import FileReader

__all__ = ["build_manifest", "describe_file", "file_pieces"]

_READ = 4 * 2**20  # bytes read at a time for a digest
_REMEDY = "save the same state on all ranks: the same keys, shapes and types, in the same order"


def describe_file(name: str, reader: FileReader) -> ExtraFile:
    """Return the record of a file that somebody else wrote into the checkpoint.

    Args:
        name: Its path relative to the checkpoint's directory.
        reader: The open file.
    """
    return ExtraFile(name, reader.size, digest_of_parts(file_pieces(reader)))


def file_pieces(reader: FileReader) -> Iterator[memoryview]:
    """Yield the bytes of a file from begin to end, in memory that is used again for the next ones."""
    memory = memoryview(bytearray(min(_READ, reader.size)))
    for begin in range(0, reader.size, _READ):
        piece = memory[: min(_READ, reader.size - begin)]
        reader.read_into(begin, piece)
        yield piece


def build_manifest(
    reports: Sequence[str | None], *, metadata: Mapping[str, Any], path: str = "", stamp: Stamp = NO_STAMP
) -> bytes:
    """Return the manifest's bytes: the checkpoint is committed when they are in place under ``MANIFEST_NAME``.

    Args:
        reports: What :meth:`RankFiles.report` returned on each rank, in rank order; None for a rank that has written nothing.
        metadata: Plain data to keep with the checkpoint.
        path: The checkpoint, for messages.
        stamp: What it says of its own age.

    Raises:
        SerializationError: ``metadata`` are no plain data, or the ranks do not hold parts of one state.
        CheckpointError: A report is missing or of another save.
    """
    encoded, tensors = encode_plain(dict(metadata), key="metadata")
    if tensors:
        raise SerializationError(
            "the metadata hold a tensor", path=path or None, key=f"metadata.{tensors[0][0]}", remedy="save it in a part"
        )
    first = json.loads(str(reports[0]).partition("\n")[0])
    complete = [_nothing(rank, first) if report is None else report for rank, report in enumerate(reports)]
    summaries, records, commons = zip(*(report.split("\n") for report in complete), strict=True)
    found = [json.loads(summary) for summary in summaries]
    _check_reports(found, path or None)
    return encode_manifest(
        save_id=found[0]["save"],
        metadata=encoded,
        kinds=found[0]["kinds"],
        parts=commons[0],
        ranks=records,
        stamp=stamp,
    )


def _nothing(rank: int, first: dict[str, Any]) -> str:
    """Return the report of a rank that has written nothing, in the save that rank 0's summary is of."""
    summary = {**first, "rank": rank, "names": [], "written": dict.fromkeys(first["written"], 0)}
    record = {"rank": rank, "files": [], "digests": None, "parts": {}, "extra": []}
    return "\n".join([json.dumps(summary), json.dumps(record), "{}"])


def _check_reports(summaries: Sequence[dict[str, Any]], path: str | None) -> None:
    first = summaries[0]
    names: dict[str, int] = {MANIFEST_NAME: 0}
    for rank, summary in enumerate(summaries):
        if (summary["rank"], summary["world_size"], summary["save"]) != (rank, len(summaries), first["save"]):
            raise CheckpointError(
                f"the report of rank {rank} is of another save: rank {summary['rank']} of {summary['world_size']}, save "
                f"{summary['save']} and not {first['save']}",
                path=path,
                remedy="save on all ranks, the same number of times",
            )
        if summary["kinds"] != first["kinds"]:
            raise SerializationError(f"rank {rank} saves other parts than rank 0", path=path, remedy=_REMEDY)
        for name, table in summary["tables"].items():
            if table != first["tables"][name]:
                raise SerializationError(
                    f"rank {rank} has other tensors in the part {name!r} than rank 0",
                    path=path,
                    key=name,
                    remedy=_REMEDY,
                )
        for name in summary["names"]:
            if name in names:
                raise SerializationError(
                    f"ranks {names[name]} and {rank} have both written a file {name!r}",
                    path=path,
                    key=name,
                    remedy="give every rank's file its own name, or write it on one rank only",
                )
            names[name] = rank
    for name, total in first["totals"].items():
        written = sum(summary["written"][name] for summary in summaries)
        if written != total:
            raise SerializationError(
                f"the ranks have written {written} bytes of the part {name!r}, which has {total}",
                path=path,
                key=name,
                remedy=_REMEDY,
            )
