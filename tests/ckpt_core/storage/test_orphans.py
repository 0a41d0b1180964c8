"""Uploads that dead processes left: found, distinguished from those of living processes, and deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import stamina
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.storage import storage_for
from ckpt_core.storage.fsspec_storage import FsspecStorage
from tests.support.fault_proxy import FaultProxy, start_proxy
from tests.support.servers import Server
from tests.support.stores import unfinished_uploads

WINDOW = 16 * 2**20


def wait_for_a_part(filesystem: Any, bucket: str, key: str) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        for upload in filesystem.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", []):
            identity = {"Bucket": bucket, "Key": key, "UploadId": upload["UploadId"]}
            if upload["Key"] == key and filesystem.call_s3("list_parts", **identity).get("Parts"):
                return
        time.sleep(0.05)
    raise AssertionError("no part of the upload has arrived")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["moto", "ceph"])
def test_only_uploads_that_have_been_silent_are_deleted(kind: str, server_of: Callable[[str], Server]) -> None:
    server = server_of(kind)
    bucket = server.new_bucket()
    root = f"{bucket}/runs"
    storage: Any = storage_for(root, dict(server.options))
    filesystem = storage._filesystem
    orphans = ["runs/a.ckpt", "runs/checkpoint/model.safetensors"]
    others = ["elsewhere/a.ckpt", "runs/deep/down/a.ckpt", "runs2/a.ckpt"]
    for key in orphans + others:
        upload = filesystem.call_s3("create_multipart_upload", Bucket=bucket[5:], Key=key)
        part = {"UploadId": upload["UploadId"], "PartNumber": 1, "Body": b"x" * 100}
        filesystem.call_s3("upload_part", Bucket=bucket[5:], Key=key, **part)
    living = storage.create(f"{root}/living.ckpt", 3 * WINDOW)
    for begin in range(0, 3 * WINDOW, WINDOW):
        living.write_at(begin, memoryview(bytearray(WINDOW)))
    wait_for_a_part(filesystem, bucket[5:], "runs/living.ckpt")  # moto dates uploads without parts to the year 2010
    assert list(storage.remove_orphans(root)) == []
    living.commit(3 * WINDOW)
    storage.abandoned_after_seconds = -1.0  # the clock of the store shows whole seconds
    assert sorted(storage.remove_orphans(root)) == [f"{bucket}/{key}" for key in orphans]
    assert sorted(unfinished_uploads(root, storage)) == sorted(others)
    assert list(storage.remove_orphans(f"{bucket}/nothing/there")) == []
    assert storage.exists(f"{root}/living.ckpt")


# ---- deleted by the next save there ----------------------------------------------------------------------------------


def leave_upload(server: Server, root: str, name: str, *, parts: bool = True) -> str:
    """Begin an upload as a process does that is then killed; return its key."""
    storage: Any = storage_for(root, dict(server.options))
    bucket, _, directory = root.removeprefix("s3://").partition("/")
    key = f"{directory}/{name}"
    upload = storage._filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    if parts:
        part = {"UploadId": upload["UploadId"], "PartNumber": 1, "Body": b"x" * 100}
        storage._filesystem.call_s3("upload_part", Bucket=bucket, Key=key, **part)
    return key


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def looks_at_uploads(proxy: FaultProxy) -> int:
    return len([request for request in proxy.requests if request.startswith("GET ") and "uploads" in request])


def save(checkpointer: Checkpointer | DirectoryCheckpointer, path: str) -> None:
    state = {"w": torch.ones(1000)}
    if isinstance(checkpointer, Checkpointer):
        checkpointer.save(state, path)
    else:
        checkpointer.save([Part("model", state, Kind.REPLICATED)], path)
    checkpointer.wait()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["moto", "ceph"])
def test_a_process_cleans_a_directory_up_once(
    kind: str, server_of: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of(kind)
    monkeypatch.setattr(FsspecStorage, "abandoned_after_seconds", -1.0)  # the clock of the store shows whole seconds
    root = f"{server.new_bucket()}/runs"
    direct = storage_for(root, dict(server.options))
    leave_upload(server, root, "a.ckpt")
    leave_upload(server, root, "checkpoint/model.safetensors")
    others = [leave_upload(server, root, "deep/down/a.ckpt"), leave_upload(server, root, "begun.ckpt", parts=False)]
    with start_proxy(server.endpoint) as proxy:
        options = dict(server.through(proxy.endpoint).options)
        for checkpointer in (
            Checkpointer(strategy="sync", storage_options=options),
            Checkpointer(strategy="async", storage_options=options),
            DirectoryCheckpointer(storage_options=options),
        ):
            with checkpointer:
                for number in range(3):
                    save(checkpointer, f"{root}/{number}.ckpt")
                    wait_until(lambda: sorted(unfinished_uploads(root, direct)) == sorted(others))
            assert looks_at_uploads(proxy) == 1
    assert list(direct.remove_orphans(root)) == [f"{root}/begun.ckpt"]


def test_a_store_that_does_not_tell_of_uploads_is_saved_to(
    server_of: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_of("moto")
    root = f"{server.new_bucket()}/runs"
    stamina.set_testing(True, attempts=2, cap=True)
    with start_proxy(server.endpoint) as proxy, caplog.at_level(logging.INFO, "ckpt_core"):
        happens = proxy.fault_of_next
        monkeypatch.setattr(
            proxy, "fault_of_next", lambda request: happens(request) or ("500" if "uploads" in request else None)
        )
        try:
            with Checkpointer(strategy="sync", storage_options=dict(server.through(proxy.endpoint).options)) as writer:
                writer.save({"step": 1}, f"{root}/1.ckpt")
                wait_until(lambda: "could not look for unfinished uploads" in caplog.text)
                writer.save({"step": 2}, f"{root}/2.ckpt")
                assert writer.load(f"{root}/2.ckpt") == {"step": 2}
        finally:
            stamina.set_testing(False)
    assert caplog.text.count("could not look for unfinished uploads") == 1


def test_an_object_to_try_obstore_goes_when_its_process_must_be_dead(server_of: Callable[[str], Server]) -> None:
    server = server_of("moto")
    root = f"{server.new_bucket()}/runs"
    storage: Any = storage_for(root, dict(server.options))
    probe = f"{root}/.ckpt-probe-0123456789abcdef"
    for path in (probe, f"{root}/a.ckpt"):
        storage.put(path, b"x")
    assert list(storage.orphans(root)) == list(storage.remove_orphans(root)) == []
    storage.abandoned_after_seconds = -1.0  # the clock of the store shows whole seconds
    assert list(storage.orphans(root)) == [probe]
    assert list(storage.remove_orphans(root)) == [probe]
    assert not storage.exists(probe)
    assert storage.exists(f"{root}/a.ckpt")
