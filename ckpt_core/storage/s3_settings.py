"""What S3 needs of s3fs's settings."""

from __future__ import annotations

import os
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
