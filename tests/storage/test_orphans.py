"""Uploads that dead processes left: found, told from those of living ones, and deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_core.storage.remote import remote_storage
from tests.support.servers import Server
from tests.support.stores import unfinished_uploads

WINDOW = 16 * 2**20


def wait_for_a_part(filesystem: Any, bucket: str, key: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for upload in filesystem.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", []):
            identity = {"Bucket": bucket, "Key": key, "UploadId": upload["UploadId"]}
            if upload["Key"] == key and filesystem.call_s3("list_parts", **identity).get("Parts"):
                return
        time.sleep(0.05)
    raise AssertionError("no part of the upload has arrived")


@pytest.mark.parametrize("kind", ["moto", "ceph"])
def test_only_uploads_that_have_been_silent_are_deleted(kind: str, server_of: Callable[[str], Server]) -> None:
    server = server_of(kind)
    bucket = server.new_bucket()
    root = f"{bucket}/runs"
    storage: Any = remote_storage(root, dict(server.options))
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
