"""Default settings of s3fs for checkpoints on S3: checksums, retries and time-outs."""

from __future__ import annotations

import os
from typing import Any

import fsspec


def s3_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for s3fs, with our defaults for those that the user has not set."""
    config = {
        # By default, botocore adds checksums, which cost a fifth of the processor time; and stores other than AWS
        # answer ranged reads with checksums that do not match.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"max_attempts": 0},  # our own retries replace those of botocore
        "connect_timeout": 10,
        "read_timeout": 60,
        **(options.get("config_kwargs") or {}),
    }
    if _is_encrypted(options):
        # TLS protects the bytes already, and their SHA-256 would take a third of the client's processor time.
        config["s3"] = {"payload_signing_enabled": False, **(config.get("s3") or {})}
    return {"use_listings_cache": False, **options, "config_kwargs": config}


def _is_encrypted(options: dict[str, Any]) -> bool:
    """Return whether requests go through TLS: they do unless an endpoint without TLS is configured."""
    named = [
        options.get("endpoint_url"),
        (options.get("client_kwargs") or {}).get("endpoint_url"),
        fsspec.config.conf.get("s3", {}).get("endpoint_url"),
        *(os.environ.get(name) for name in ("FSSPEC_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
    ]
    endpoint = next(filter(None, named), "https://")
    return bool(options.get("use_ssl", True)) and str(endpoint).startswith("https://")
