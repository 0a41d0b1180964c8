"""Blocks of a blob through adlfs: staged in any order, visible by one commit of their list."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from ckpt_core.storage.failures import Describe
from ckpt_core.storage.parts import PartUpload
from ckpt_core.storage.retrying import Retries

__all__ = ["AzureUpload", "wait_for_copy"]

_METADATA = {"is_directory": "false"}  # as adlfs writes it, which tells files from directories by it


class AzureUpload(PartUpload):
    """A blob under construction.

    Args:
        filesystem: An ``adlfs.AzureBlobFileSystem``.
        path: URL of the blob.
        retries: Carries out the requests.
        describe: ``describe(action, path)`` makes errors for the user.
    """

    most_parts = 50_000

    def __init__(self, filesystem: Any, path: str, retries: Retries, describe: Callable[[str, str], Describe]) -> None:
        self._filesystem = filesystem
        self._container, self._blob, _ = filesystem.split_path(path)
        self._path = path
        self._retries = retries
        self._describe = describe
        self._mark = uuid.uuid4().hex

    async def _call(self, action: str, method: str, *arguments: Any, **options: Any) -> None:
        async def request() -> None:
            client = self._filesystem.service_client.get_blob_client(self._container, self._blob)
            async with client:
                # The package's own retries begin with a pause of 15 seconds: ours take over.
                await getattr(client, method)(*arguments, retry_total=0, **options)

        await self._retries.call_async(request, self._describe(action, self._path))

    def _block(self, number: int) -> str:
        return f"{self._mark}-{number:06d}"  # all of the same length, as the service demands

    async def begin(self) -> None:
        """Nothing to prepare."""

    async def send(self, number: int, data: memoryview) -> None:
        await self._call("write", "stage_block", self._block(number), data, length=len(data))

    async def complete(self, count: int) -> None:
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(self._block(number)) for number in range(count)]
        await self._call("commit", "commit_block_list", blocks, metadata=_METADATA)

    async def put(self, data: bytearray) -> None:
        await self._call("commit", "upload_blob", bytes(data), overwrite=True, metadata=_METADATA)

    async def abandon(self) -> None:
        """Nothing to do: the service deletes blocks that were never committed, after a week."""


async def wait_for_copy(filesystem: Any, path: str) -> None:
    """Return when the service has carried out the copy into ``path`` that it has accepted.

    Raises:
        OSError: It has failed.
    """
    container, blob, _ = filesystem.split_path(path)
    async with filesystem.service_client.get_blob_client(container, blob) as client:
        while (copy := (await client.get_blob_properties()).copy).status == "pending":
            await asyncio.sleep(0.5)
    if copy.status not in (None, "success"):
        raise OSError(f"the copy has ended with status {copy.status}: {copy.status_description}")
