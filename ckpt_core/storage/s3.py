"""What S3 needs besides s3fs: its settings, and the clean-up of multipart uploads that dead processes left."""

from __future__ import annotations

import datetime
import email.utils
import math
import os
from collections.abc import Iterator
from typing import Any

import fsspec


def s3_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for s3fs with what we rely on added where the user has not decided otherwise."""
    config = {
        # The checksums that botocore adds otherwise cost a fifth of the processor time, and other stores than AWS
        # answer ranged reads with ones that do not fit.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"max_attempts": 0},  # ours take over
        "connect_timeout": 10,
        "read_timeout": 60,
        **(options.get("config_kwargs") or {}),
    }
    if _is_encrypted(options):
        # The connection guards the bytes already; their SHA-256 takes a third of the client's processor time.
        config["s3"] = {"payload_signing_enabled": False, **(config.get("s3") or {})}
    return {"use_listings_cache": False, **options, "config_kwargs": config}


def _is_encrypted(options: dict[str, Any]) -> bool:
    """Return whether requests go through TLS, which is so unless an endpoint without it is named."""
    named = [
        options.get("endpoint_url"),
        (options.get("client_kwargs") or {}).get("endpoint_url"),
        fsspec.config.conf.get("s3", {}).get("endpoint_url"),
        *(os.environ.get(name) for name in ("FSSPEC_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
    ]
    endpoint = next(filter(None, named), "https://")
    return bool(options.get("use_ssl", True)) and str(endpoint).startswith("https://")


def abandoned_uploads(
    filesystem: Any, directory: str, silent_seconds: float, *, empty: bool
) -> Iterator[dict[str, str]]:
    """Yield the uploads into ``directory``, or a directory directly in it, to which nobody has added for so long.

    Time is that of the store's clock. With ``empty``, those count of which no part has arrived: they cost nothing, and
    some servers do not tell when they began. Each is given as arguments of ``abort_multipart_upload``.
    """
    bucket, key, _ = filesystem.split_path(directory)
    prefix = f"{key.rstrip('/')}/" if key else ""
    more: dict[str, str] = {}
    while True:
        page = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
        for upload in page.get("Uploads", []):
            name = upload["Key"].removeprefix(prefix)
            if upload["Key"].startswith(prefix) and name.count("/") <= 1:
                arguments = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                begun = upload["Initiated"] if empty else None
                if _seconds_silent(filesystem, arguments, begun, page) >= silent_seconds:
                    yield arguments
        if not page.get("IsTruncated"):
            return
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _seconds_silent(
    filesystem: Any, upload: dict[str, str], begun: datetime.datetime | None, page: dict[str, Any]
) -> float:
    now = email.utils.parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
    times = [begun] if begun is not None else []
    more: dict[str, int] = {}
    try:
        while True:
            parts = filesystem.call_s3("list_parts", **upload, **more)
            times += [part["LastModified"] for part in parts.get("Parts", [])]
            if not parts.get("IsTruncated"):
                return float((now - max(times)).total_seconds()) if times else -math.inf
            more = {"PartNumberMarker": parts["NextPartNumberMarker"]}
    except FileNotFoundError:
        return 0.0  # completed or aborted meanwhile
