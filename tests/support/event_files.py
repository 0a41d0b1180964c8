"""Reads scalars from TensorBoard's event files."""

from __future__ import annotations

import struct
from pathlib import Path


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) pairs of each scalar in the event files below a folder, by tag."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.rglob("events.out.tfevents*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)  # followed by its checksum, the record, the record's checksum
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found
