"""Compares ours with raw parallel clients of an object store and with Lightning; and measures what verification costs.

The server runs on this machine: ``rclone serve s3`` over a directory (obstore cannot read from it, so ours uses
fsspec's client there), or with ``--server ceph`` a real Ceph in memory, in which each request takes some milliseconds.
It shares the processors with the clients, so the client's processor time is the more reliable figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import torch
from aiobotocore.session import get_session
from botocore.config import Config
from lightning.pytorch.plugins.io import TorchCheckpointIO

from ckpt_core import Checkpointer
from ckpt_core._layouts.torch_file import opening
from ckpt_core.storage.uploads import PART_BYTES
from tests.support.servers import ACCESS_KEY, SECRET_KEY, STARTERS, Server

_UNDER_WAY = 6  # parts of an upload at a time, as in ours
_READ_BYTES = 16 * 2**20  # per request, as in ours
_READS_UNDER_WAY = 8
_LEAST_VERIFICATIONS = 11  # rounds: the difference is smaller than the noise of one
Action = Callable[[], Any]


def table(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Print the tables; return their figures."""
    nbytes = options.megabytes * 10**6 // 4096 * 4096
    state = _state(nbytes)
    print(f"{nbytes / 1e6:.0f} MB, {options.repeats} rounds, {torch.get_num_threads()} threads\n", flush=True)
    home = directory / "server"
    home.mkdir()
    with STARTERS[options.server](home) as server, contextlib.closing(_Objects(server)) as objects:
        gc.collect()  # s3fs closes collected clients on the loop that runs, which must not be the raw client's
        with contextlib.closing(_RawClient(server, objects.bucket)) as raw:
            uploads = _uploads(server, objects, raw, state, nbytes)
            figures = {"upload": _rounds(uploads, options.repeats, nbytes, between=objects.delete_replaced)}
            downloads = _downloads(server, objects, raw, nbytes)
            figures["download"] = _rounds(downloads, options.repeats, nbytes)
    for direction, found in figures.items():
        _print(direction, found)
    figures["verification"] = _verification(state, directory, max(options.repeats, _LEAST_VERIFICATIONS))
    return figures


def _state(nbytes: int, tensors: int = 32) -> dict[str, Any]:
    """Return a state of so many bytes, of tensors of several sizes."""
    generator = torch.Generator().manual_seed(0)
    weights = [2.0 ** (index % 4) for index in range(tensors)]
    sizes = [int(nbytes / 4 * weight / sum(weights)) for weight in weights]
    return {"state_dict": {f"layer.{i}": torch.randn(size, generator=generator) for i, size in enumerate(sizes)}}


def _new_memory(nbytes: int) -> memoryview:
    """Return new memory, as a loaded state would be in."""
    return memoryview(torch.empty(nbytes, dtype=torch.uint8).numpy())


class _Objects:
    """Paths of objects, a new one for each upload: deleting a replaced one may take as long as storing the new."""

    def __init__(self, server: Server) -> None:
        self.bucket = server.new_bucket()
        self._server = server
        self._newest: dict[str, str] = {}
        self._replaced: list[str] = []
        self._count = itertools.count()
        self._open = contextlib.ExitStack()

    def new(self, name: str) -> str:
        """Return the path of the next object of that name."""
        if name in self._newest:
            self._replaced.append(self._newest[name])
        self._newest[name] = f"{self.bucket}/{next(self._count)}-{name.replace(', ', '-')}"
        return self._newest[name]

    def newest(self, name: str) -> str:
        """Return the path of the newest object of that name."""
        return self._newest[name]

    def keep(self, checkpointer: Checkpointer) -> Checkpointer:
        """Keep a checkpointer open as long as the server runs."""
        return self._open.enter_context(checkpointer)

    def close(self) -> None:
        """Close the checkpointers."""
        self._open.close()

    def delete_replaced(self) -> None:
        """Delete all but the newest object of each name."""
        filesystem = fsspec.filesystem("s3", **self._server.options)
        while self._replaced:
            filesystem.rm_file(self._replaced.pop())


# ---- contenders ------------------------------------------------------------------------------------------------------


class _RawClient:
    """Multipart uploads and ranged reads by ``aiobotocore`` alone, several requests at a time."""

    def __init__(self, server: Server, bucket: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._bucket = bucket.removeprefix("s3://")
        config = Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=_READS_UNDER_WAY,
        )
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "region_name": "us-east-1"}
        # Kept, because :meth:`close` closes the client through it.
        self._context = get_session().create_client("s3", endpoint_url=server.endpoint, config=config, **keys)
        self._client = self._loop.run_until_complete(self._context.__aenter__())

    def close(self) -> None:
        """Close the connections."""
        self._loop.run_until_complete(self._context.__aexit__(None, None, None))
        self._loop.close()

    def _key(self, path: str) -> str:
        return path.removeprefix(f"s3://{self._bucket}/")

    def upload(self, path: str, data: bytearray) -> None:
        """Upload ``data`` in parts."""
        self._loop.run_until_complete(self._upload(self._key(path), data))

    async def _upload(self, key: str, data: bytearray) -> None:
        target = {"Bucket": self._bucket, "Key": key}
        upload = {**target, "UploadId": (await self._client.create_multipart_upload(**target))["UploadId"]}

        async def send(number: int) -> dict[str, Any]:
            async with slots:
                # The client accepts only bytes.
                body = bytes(memoryview(data)[number * PART_BYTES : (number + 1) * PART_BYTES])
                answer = await self._client.upload_part(**upload, PartNumber=number + 1, Body=body)
            return {"PartNumber": number + 1, "ETag": answer["ETag"]}

        slots = asyncio.Semaphore(_UNDER_WAY)
        parts = await asyncio.gather(*(send(number) for number in range(-(-len(data) // PART_BYTES))))
        await self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    def download(self, path: str, nbytes: int) -> None:
        """Read an uploaded object into new memory, by ranged reads."""
        self._loop.run_until_complete(self._download(self._key(path), _new_memory(nbytes)))

    async def _download(self, key: str, target: memoryview) -> None:
        async def read(begin: int) -> None:
            end = min(begin + _READ_BYTES, len(target))
            async with slots:
                wanted = f"bytes={begin}-{end - 1}"
                answer = await self._client.get_object(Bucket=self._bucket, Key=key, Range=wanted)
                target[begin:end] = await answer["Body"].read()

        slots = asyncio.Semaphore(_READS_UNDER_WAY)
        await asyncio.gather(*(read(begin) for begin in range(0, len(target), _READ_BYTES)))


def _obstore_of(server: Server, bucket: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        bucket.removeprefix("s3://"),
        endpoint=server.endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": True},
    )


def _uploads(
    server: Server, objects: _Objects, raw: _RawClient, state: dict[str, Any], nbytes: int
) -> dict[str, Action]:
    import obstore

    data = bytearray(os.urandom(2**20) * (nbytes // 2**20 + 1))[:nbytes]
    store = _obstore_of(server, objects.bucket)
    options = dict(server.options)

    def put_by_obstore() -> None:
        name = objects.new("raw obstore").rpartition("/")[2]
        obstore.put(store, name, data, chunk_size=PART_BYTES, max_concurrency=_UNDER_WAY)

    slow = {**options, "backend": "fsspec"}
    contenders: dict[str, Action] = {
        "raw aiobotocore": lambda: raw.upload(objects.new("raw"), data),
        "raw obstore": put_by_obstore,
    }
    for name, settings in (("ours", options), ("ours, fsspec", slow)):
        for strategy in ("sync", "async"):
            contenders[f"{name}, {strategy}"] = _saving(strategy, settings, state, objects, name)
    contenders["Lightning TorchCheckpointIO"] = _by_lightning(
        options, lambda: TorchCheckpointIO().save_checkpoint(state, objects.new("lightning"))
    )
    return contenders


def _saving(strategy: Any, settings: dict[str, Any], state: dict[str, Any], objects: _Objects, name: str) -> Action:
    checkpointer = objects.keep(Checkpointer(strategy=strategy, storage_options=settings))

    def save() -> None:
        checkpointer.save(state, objects.new(name))
        checkpointer.wait()

    return save


def _downloads(server: Server, objects: _Objects, raw: _RawClient, nbytes: int) -> dict[str, Action]:
    import obstore

    store = _obstore_of(server, objects.bucket)
    options = dict(server.options)
    uploaded = objects.newest("raw")
    begins = list(range(0, nbytes, _READ_BYTES))
    ends = [min(begin + _READ_BYTES, nbytes) for begin in begins]

    def read_by_obstore() -> None:
        target = _new_memory(nbytes)
        for begin, end, piece in zip(
            begins,
            ends,
            obstore.get_ranges(store, uploaded.rpartition("/")[2], starts=begins, ends=ends),
            strict=True,
        ):
            target[begin:end] = memoryview(piece)

    ours, lightning = objects.newest("ours"), objects.newest("lightning")
    load = Checkpointer(storage_options=options).load
    contenders: dict[str, Action] = {
        "raw aiobotocore": lambda: raw.download(uploaded, nbytes),
        "raw obstore": read_by_obstore,
        "ours": lambda: load(ours),
        "ours, fsspec": lambda: Checkpointer(storage_options={**options, "backend": "fsspec"}).load(ours),
        "ours, not verified": _unverified(lambda: load(ours)),
        "Lightning TorchCheckpointIO": _by_lightning(options, lambda: TorchCheckpointIO().load_checkpoint(lightning)),
    }
    if server.kind == "rclone":  # its answers to ranged reads are refused by obstore
        del contenders["raw obstore"], contenders["ours, fsspec"]  # "ours" is fsspec there anyway
    return contenders


def _by_lightning(options: dict[str, Any], action: Action) -> Action:
    """Return ``action`` with the options in fsspec's configuration, because Lightning's plugin does not take them."""
    # rclone answers ranged reads with the checksum of the whole object.
    settings = {**options, "config_kwargs": {"response_checksum_validation": "when_required"}}

    def act() -> None:
        with mock.patch.dict(fsspec.config.conf, {"s3": settings}):
            action()

    return act


class _EqualToAll(str):
    """A digest that is equal to every other, so that no comparison fails."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def _unverified(action: Action) -> Action:
    """Return ``action`` without the cost of verification: the digests of the tensors' bytes are not computed."""

    def act() -> Any:
        with mock.patch.object(opening, "digest_with", return_value=lambda _: _EqualToAll()):
            return action()

    return act


# ---- measuring -------------------------------------------------------------------------------------------------------


def _rounds(
    contenders: dict[str, Action], repeats: int, nbytes: int, *, between: Action = lambda: None
) -> dict[str, dict[str, float]]:
    """Time every contender in turn, round by round; the first round is a warm-up. ``between`` is called untimed."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    names = list(contenders)
    for repeat in range(repeats + 1):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            between()
            os.sync()
            begun, busy = time.perf_counter(), time.process_time()
            contenders[name]()
            times = time.perf_counter() - begun, time.process_time() - busy
            if repeat > 0:
                seconds[name].append(times)
    return {
        name: {
            "megabytes_per_second": nbytes / 1e6 / statistics.median(wall for wall, _ in times),
            "cpu_seconds_per_gigabyte": statistics.median(busy for _, busy in times) / (nbytes / 1e9),
        }
        for name, times in seconds.items()
    }


def _print(direction: str, found: dict[str, dict[str, float]]) -> None:
    raw, stock = (found[name]["megabytes_per_second"] for name in ("raw aiobotocore", "Lightning TorchCheckpointIO"))
    print(f"\n{direction:32s} {'MB/s':>8s} {'x raw':>7s} {'x Lightning':>12s} {'CPU s/GB':>9s}")
    for name, figures in found.items():
        speed = figures["megabytes_per_second"]
        print(
            f"{name:32s} {speed:8.0f} {speed / raw:6.2f}x {speed / stock:11.2f}x "
            f"{figures['cpu_seconds_per_gigabyte']:9.2f}"
        )


def _verification(state: dict[str, Any], directory: Path, repeats: int) -> dict[str, float]:
    """Compare loads from a local disk with and without verification, with the file in the page cache and without."""
    path = directory / "local.ckpt"
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(state, path)
        actions = {"verified": lambda: checkpointer.load(path)}
        actions["not verified"] = _unverified(actions["verified"])
        found: dict[str, list[float]] = {}
        for repeat in range(repeats + 1):
            for cache in ("cold", "warm"):
                for name in sorted(actions, reverse=bool(repeat % 2)):
                    with _page_cache(path, keep=cache == "warm"):
                        begun = time.perf_counter()
                        actions[name]()
                        if repeat > 0:
                            found.setdefault(f"{cache}, {name}", []).append(time.perf_counter() - begun)
    medians = {name: statistics.median(times) for name, times in found.items()}
    print(f"\n{'load from a local disk':32s} {'verified':>12s} {'not verified':>13s} {'verification':>13s}")
    for cache in ("cold", "warm"):
        with_it, without = medians[f"{cache}, verified"], medians[f"{cache}, not verified"]
        share = 1 - without / with_it
        print(f"{cache:32s} {with_it * 1e3:9.0f} ms {without * 1e3:10.0f} ms {share:12.0%}")
    print("\nx raw: speed over that of raw aiobotocore; verification: its share of the load time")
    return medians


@contextlib.contextmanager
def _page_cache(path: Path, *, keep: bool) -> Iterator[None]:
    if not keep:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    yield
