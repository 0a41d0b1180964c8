"""Reads and uploads of objects on S3, Azure and GCS through ``obstore``: outside of Python and without the GIL.

The client of fsspec for the same store finds the credentials and the endpoint, and makes the small requests; obstore
moves the contents of objects. If obstore cannot be used, :class:`NotSuitableError` says why, and the client of fsspec
does that, too.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import fsspec.asyn

from ckpt_core.storage.base import divide_into
from ckpt_core.storage.retry import IncompleteAnswerError

OBSTORE_OPTIONS = (
    "client_options",
    "retry_config",
)  # names in storage_options that are obstore's own; fsspec's clients know neither
_MARK = "ckptupload"  # key of metadata that identifies the upload which has made an object; Azure allows letters only
_PARTS_UNDER_WAY = 6
_CREDENTIALS_LAST = datetime.timedelta(minutes=9)  # botocore replaces credentials 10 minutes before they expire
_AZURE_SCOPE = "https://storage.azure.com/.default"
# A failed read is repeated by fsspec's client; a failed part of an upload can be repeated by obstore only.
_READING = {"max_retries": 1, "retry_timeout": datetime.timedelta(minutes=1)}
_WRITING = {
    "max_retries": 9,
    "retry_timeout": datetime.timedelta(minutes=5),
    "backoff": {
        "init_backoff": datetime.timedelta(seconds=0.2),
        "max_backoff": datetime.timedelta(seconds=30),
        "base": 4,  # a pause is random, up to this many times the last one: below 2.8, pauses tend to shrink
    },
}

# The settings of s3fs that are taken over here, or that do not affect how objects are read and written.
_S3_SETTINGS = {
    "config_kwargs": {
        "connect_timeout",
        "max_pool_connections",
        "read_timeout",
        "region_name",
        "request_checksum_calculation",
        "response_checksum_validation",
        "retries",
        "s3",
        "tcp_keepalive",
        "user_agent_extra",
    },
    "client_kwargs": {
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "endpoint_url",
        "region_name",
        "use_ssl",
        "verify",
    },
}

# ID of the process that has obstore's threads: they do not survive a fork, after which every request would hang.
_process: int | None = None


class NotSuitableError(Exception):
    """Obstore cannot be used for a bucket; the message says why."""


class ObstoreClient:
    """A client for one bucket, with the settings of fsspec's client; raises :class:`NotSuitableError` if unsuitable."""

    def __init__(self, protocol: str, filesystem: Any, path: str, options: Mapping[str, Any]) -> None:
        refuse_fork()
        try:
            import obstore
            from obstore.store import AzureStore, GCSStore, S3Store
        except ImportError as error:
            raise NotSuitableError("it is not installed") from error
        settings = {"s3": _s3_settings, "az": _azure_settings, "gs": _gcs_settings}[protocol]
        self._filesystem = filesystem
        self._obstore = obstore
        bucket = filesystem.split_path(path)[0]
        arguments = settings(filesystem, bucket)
        config: dict[str, Any] = arguments["config"]
        client = {"timeout": "120s", "connect_timeout": "10s", **arguments.pop("client_options", {})}
        client["allow_http"] = str(config.get("endpoint", "")).startswith("http://")
        client |= options.get("client_options", {})
        store: Any = {"s3": S3Store, "az": AzureStore, "gs": GCSStore}[protocol]

        def connect(retries: Mapping[str, Any]) -> Any:
            retries = options.get("retry_config", retries)
            return store(bucket, client_options=client, retry_config=retries, **arguments)

        self._reading, self._writing = connect(_READING), connect(_WRITING)
        self.has_read = False  # whether the server has ever answered a ranged read correctly
        self.has_written = False  # whether the server has accepted an object from obstore

    def knows(self, path: str) -> bool:
        """Return whether obstore can address this object: it normalizes keys with empty parts and dots."""
        key, version = self._filesystem.split_path(path)[1:]
        return bool(key) and not version and not {"", ".", ".."}.intersection(key.split("/"))

    def _key(self, path: str) -> str:
        return str(self._filesystem.split_path(path)[1])

    def read(self, path: str, begin: int, targets: Sequence[memoryview]) -> None:
        """Fill several targets, one after the other, with the bytes of an object from ``begin`` on, by one request."""
        refuse_fork()
        wanted = sum(map(len, targets))
        data = memoryview(self._obstore.get_range(self._reading, self._key(path), start=begin, length=wanted))
        if len(data) != wanted:
            raise OSError(f"the store has sent {len(data)} bytes of {wanted}")
        divide_into(data, targets)
        self.has_read = True

    def put(self, path: str, data: memoryview | bytes, *, mark: str = "", once: bool = False) -> None:
        """Write an object by one request; with ``once``, give up soon.

        ``mark`` is stored with the object, for :meth:`size_made_by`. The caller should retry after an
        :class:`IncompleteAnswerError`; obstore itself retries what the store refuses transiently.
        """
        refuse_fork()
        store = self._reading if once else self._writing
        attributes = {_MARK: mark} if mark else None
        with _incomplete_answers():
            self._obstore.put(store, self._key(path), data, attributes=attributes, use_multipart=False)

    def begin(self, path: str, first: memoryview, mark: str, *, once: bool = False) -> Any:
        """Begin an object of several parts; return obstore's writer, which reads from ``first`` until it releases it.

        With ``once``, give up soon. ``mark`` is stored with the object, for :meth:`size_made_by`. Errors as for
        :meth:`put`.
        """
        refuse_fork()
        file = self._obstore.open_writer(
            self._reading if once else self._writing,
            self._key(path),
            attributes={_MARK: mark},
            buffer_size=len(first),
            max_concurrency=_PARTS_UNDER_WAY,
        )
        with _incomplete_answers():
            file.write(first)
        return file

    def size_made_by(self, mark: str, path: str) -> int | None:
        """Return the size in bytes of an object; None if it does not exist or was not written with ``mark``.

        Raises obstore's own errors if the store does not answer.
        """
        try:
            found = self._obstore.get(self._reading, self._key(path), options={"head": True})
        except FileNotFoundError:
            return None
        return int(found.meta["size"]) if found.attributes.get(_MARK) == mark else None


@contextlib.contextmanager
def _incomplete_answers() -> Iterator[None]:
    """Raise :class:`IncompleteAnswerError` for answers, truncated or not the store's, that obstore has not retried."""
    try:
        yield
    except Exception as error:
        text = str(error).partition("\n\n")[0]
        is_final = isinstance(error, (FileNotFoundError, PermissionError)) or "Server returned" in text
        if is_final or "retries" in text:
            raise
        raise IncompleteAnswerError(text) from None


def refuse_fork() -> None:
    """Raise :class:`NotSuitableError` in a fork of a process that has used obstore."""
    global _process  # noqa: PLW0603 - a fact about the process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise NotSuitableError("this is a forked process: the threads of obstore stayed behind")


# ---- the settings of fsspec's clients, as obstore's ------------------------------------------------------------------


def _s3_settings(filesystem: Any, bucket: str) -> dict[str, Any]:
    unknown = {
        f"{group}[{name!r}]"
        for group, known in _S3_SETTINGS.items()
        for name in getattr(filesystem, group).keys() - known
    }
    unknown |= {
        name for name in ("requester_pays", "s3_additional_kwargs", "version_aware") if getattr(filesystem, name, None)
    }
    s3 = dict(filesystem.config_kwargs.get("s3") or {})
    is_signed = s3.pop("payload_signing_enabled", None)
    if s3.pop("addressing_style", "auto") not in ("auto", "path") or s3:
        unknown.add("config_kwargs['s3']")
    if unknown:
        raise NotSuitableError(f"it does not follow {', '.join(sorted(unknown))}")
    if ":" in bucket:
        raise NotSuitableError("it does not know access points")
    filesystem.connect()
    meta = filesystem.s3.meta
    endpoint = urlsplit(meta.endpoint_url)
    config: dict[str, Any] = {"region": meta.region_name or "us-east-1"}
    client: dict[str, Any] = {"connect_timeout": f"{filesystem.config_kwargs.get('connect_timeout', 10)}s"}
    if str(endpoint.hostname).endswith((".amazonaws.com", ".amazonaws.com.cn")):
        # s3fs is redirected by the server to the region of a bucket; obstore does not follow.
        with contextlib.suppress(OSError):  # not every user has the permission for head_bucket
            answer = filesystem.call_s3("head_bucket", Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
            config["region"] = answer.get("x-amz-bucket-region", config["region"])
    else:
        config |= {"endpoint": meta.endpoint_url, "virtual_hosted_style_request": False}
    if endpoint.scheme == "https":
        verify = filesystem.client_kwargs.get("verify")
        if verify is None:
            verify = filesystem.session.get_config_variable("ca_bundle")
        if verify is False:
            client["allow_invalid_certificates"] = True
        elif verify not in (None, True):
            raise NotSuitableError("it does not know the certificates that are trusted")
        # TLS protects the bytes already, and their SHA-256 would take most of the client's processor time.
        is_signed = bool(is_signed)
    config["unsigned_payload"] = is_signed is False
    _refuse_proxy(meta.endpoint_url)
    arguments: dict[str, Any] = {"config": config, "client_options": client}
    if filesystem.anon:
        config["skip_signature"] = True
        return arguments
    given = filesystem.client_kwargs
    key = filesystem.key or given.get("aws_access_key_id")
    if key:
        config["access_key_id"] = key
        config["secret_access_key"] = filesystem.secret or given.get("aws_secret_access_key")
        token = filesystem.token or given.get("aws_session_token")
        return {**arguments, "config": {**config, "session_token": token} if token else config}

    def credentials() -> dict[str, Any]:
        found = fsspec.asyn.sync(filesystem.loop, _credentials_of, filesystem.session)
        if found is None:
            raise NotSuitableError("there are no credentials")
        until = datetime.datetime.now(datetime.timezone.utc) + _CREDENTIALS_LAST
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": until,
        }

    credentials()
    return {**arguments, "credential_provider": credentials}


async def _credentials_of(session: Any) -> Any:
    credentials = await session.get_credentials()
    return None if credentials is None else await credentials.get_frozen_credentials()


def _azure_settings(filesystem: Any, _: str) -> dict[str, Any]:
    for name, usual in (("location_mode", "primary"), ("version_aware", False)):
        if getattr(filesystem, name, usual) != usual:
            raise NotSuitableError(f"it does not follow {name}")
    client = filesystem.service_client
    url, _, signature = client.url.partition("?")
    _refuse_proxy(url)
    config = {"account_name": client.account_name, "endpoint": url.rstrip("/")}
    key = getattr(client.credential, "account_key", None)
    identity = getattr(filesystem, "sync_credential", None)
    if signature:
        config["sas_key"] = signature
    elif key:
        config["account_key"] = key
    elif identity is not None:

        def credentials() -> dict[str, Any]:
            found = identity.get_token(_AZURE_SCOPE)
            until = datetime.datetime.fromtimestamp(found.expires_on, datetime.timezone.utc)
            return {"token": found.token, "expires_at": until}

        return {"config": config, "credential_provider": credentials}
    elif client.credential is None:
        config["skip_signature"] = True
    else:
        raise NotSuitableError("it does not know this kind of credential")
    return {"config": config}


def _gcs_settings(filesystem: Any, _: str) -> dict[str, Any]:
    found = filesystem.credentials
    if filesystem.requester_pays or filesystem._endpoint or os.environ.get("STORAGE_EMULATOR_HOST"):
        raise NotSuitableError("it does not follow requester_pays and endpoint_url")
    if found.credentials is None:
        raise NotSuitableError("it does not write without credentials")
    _refuse_proxy("https://storage.googleapis.com")

    def credentials() -> dict[str, Any]:
        found.maybe_refresh()
        until = found.credentials.expiry
        return {
            "token": found.credentials.token,
            "expires_at": until and until.replace(tzinfo=datetime.timezone.utc),
        }

    return {"config": {}, "credential_provider": credentials}


def _refuse_proxy(url: str) -> None:
    import urllib.request

    host = urlsplit(url)
    if urllib.request.getproxies().get(host.scheme) and not urllib.request.proxy_bypass(host.hostname or ""):
        raise NotSuitableError("there is a proxy in the environment")
