"""The options of fsspec's packages in the words of obstore."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["open_store"]

_RETRIES = {
    "max_retries": 9,
    "retry_timeout": datetime.timedelta(minutes=5),
    "backoff": {
        "init_backoff": datetime.timedelta(seconds=0.2),
        "max_backoff": datetime.timedelta(seconds=30),
        "base": 2,
    },
}
_CLIENT = {"timeout": "120s", "connect_timeout": "10s"}


def _configuration(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what obstore calls the options that fsspec's packages take; those that it does not know stay as they are."""
    given = {name: value for name, value in options.items() if value is not None and name != "project"}
    names = {
        "s3": {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"},
        "az": {"sas_token": "sas_key"},
        "gs": {"endpoint_url": "base_url"},
    }[protocol]
    given.update(given.pop("client_kwargs", {}))
    if "region_name" in given:
        given["region"] = given.pop("region_name")
    if given.pop("anon", False) or (protocol == "gs" and given.get("token") == "anon"):
        given["skip_signature"] = True
        given.pop("token", None)
    if protocol == "gs" and "token" in given:
        token = given.pop("token")
        given |= {"service_account": token} if isinstance(token, str) else {"service_account_key": json.dumps(token)}
    if "connection_string" in given:
        fields = dict(field.split("=", 1) for field in given.pop("connection_string").split(";") if field)
        parts = {"AccountName": "account_name", "AccountKey": "account_key", "SharedAccessSignature": "sas_key"}
        given |= {name: fields[field] for field, name in parts.items() if field in fields}
        if "BlobEndpoint" in fields:
            given["endpoint"] = fields["BlobEndpoint"].rstrip("/")
    configuration = {names.get(name, name): value for name, value in given.items()}
    if protocol == "s3":
        if "endpoint_url" in configuration:
            configuration["endpoint"] = configuration.pop("endpoint_url")
            configuration.setdefault("virtual_hosted_style_request", False)
            configuration.setdefault("region", "us-east-1")
        # What is sent is protected by TLS on its way, and by our digests for good.
        configuration.setdefault("unsigned_payload", True)
    return configuration


def open_store(protocol: str, bucket: str, options: Mapping[str, Any]) -> Any:
    """Return obstore's store for a bucket.

    Args:
        protocol: ``"s3"``, ``"az"`` or ``"gs"``.
        bucket: Its name; for Azure that of the container, perhaps with ``@account...``.
        options: As for fsspec's packages, or by obstore's own names.
    """
    from obstore.store import AzureStore, GCSStore, S3Store

    configuration: Any = _configuration(protocol, options)
    client = {**_CLIENT, **configuration.pop("client_options", {})}
    if str(configuration.get("endpoint", configuration.get("base_url", ""))).startswith("http://"):
        client.setdefault("allow_http", True)
    settings: dict[str, Any] = {"client_options": client, "retry_config": configuration.pop("retry_config", _RETRIES)}
    if protocol == "az":
        container, _, account = bucket.partition("@")
        if account:
            configuration.setdefault("account_name", account.partition(".")[0])
        return AzureStore(container, config=configuration, **settings)
    return (S3Store if protocol == "s3" else GCSStore)(bucket, config=configuration, **settings)
