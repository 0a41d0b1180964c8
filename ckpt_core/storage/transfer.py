"""A file from one storage to another."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_core.storage.base import Storage

__all__ = ["transfer"]

_CHUNK = 16 * 2**20  # bytes


def transfer(
    source_storage: Storage,
    source: str,
    target_storage: Storage,
    target: str,
    *,
    when_open: Callable[[], None] = lambda: None,
) -> int:
    """Make ``target`` a file with the bytes of ``source``, durable, replacing what was there; return its size.

    The file goes through 16 MiB of memory, whatever its size, besides what the writing storage needs.

    Args:
        source_storage: Where ``source`` is.
        source: The file to read.
        target_storage: Where ``target`` goes.
        target: The file to write; it appears whole or not at all.
        when_open: Called when ``source`` is open, so that it does not matter any more what becomes of its name.

    Raises:
        CheckpointNotFoundError: There is no ``source``.
        StorageError: One of the storages refused.
    """
    with source_storage.open(source) as reader:
        when_open()
        writer = target_storage.create(target, reader.size)
        try:
            memory = memoryview(bytearray(min(_CHUNK, reader.size)))
            for offset in range(0, reader.size, _CHUNK):
                chunk = memory[: reader.size - offset]
                reader.read_into(offset, chunk)
                writer.write_at(offset, chunk)
            writer.commit(reader.size)
        except BaseException:
            writer.abort()
            raise
        return reader.size
