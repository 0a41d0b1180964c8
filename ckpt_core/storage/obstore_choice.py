"""The choice between obstore and fsspec's client for reads and uploads: by the user's options and by a probe."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ckpt_core.errors import CheckpointError, StorageError
from ckpt_core.storage.failures import Secrets, describer
from ckpt_core.storage.obstore_client import NotSuitableError, ObstoreClient

logger = logging.getLogger(__name__)

# The clients of one server, by bucket and options; None if obstore is not used. Without a lock: a signal handler that
# saves could wait for it for ever, if it interrupts the search for credentials.
KnownClients: TypeAlias = dict[str, ObstoreClient | None]
PROBE_PREFIX = ".ckpt-probe-"
_LOGGED: set[tuple[str, str]] = set()  # buckets for which obstore is not used, with the reason, as already logged


class Requests(Protocol):
    """The requests for small objects that fsspec's client makes."""

    def put(self, path: str, data: bytes) -> None: ...

    def fetch(self, path: str, begin: int, end: int) -> bytes: ...

    def delete(self, path: str) -> None: ...


class ObstoreChoice:
    """Decides which client reads and writes the objects of one store; probes a server only once.

    ``kind`` is obstore's own name for the kind of store, None if it does not support it. ``backend`` is the user's
    option: ``"obstore"`` (an error if it cannot be used), ``"fsspec"`` or None.
    """

    def __init__(
        self,
        kind: str | None,
        backend: str | None,
        filesystem: Any,
        options: Mapping[str, Any],
        *,
        known: KnownClients,
        secrets: Secrets,
    ) -> None:
        self._kind, self._backend, self._filesystem, self._options = kind, backend, filesystem, dict(options)
        self._known, self._secrets = known, secrets

    def client_of(self, path: str) -> ObstoreClient | None:
        """Return the obstore client for the object; None if the client of fsspec is to be used."""
        identity = self._identity_of(path)
        if self._kind is None or identity is None:
            return None
        if identity not in self._known:
            try:
                client = ObstoreClient(self._kind, self._filesystem, path, self._options)
                self._known.setdefault(identity, client)
            except Exception as error:  # noqa: BLE001 - whatever the credentials provider raises
                self._give_up(identity, path, error)
        found = self._known[identity]
        return found if found is not None and found.knows(path) else None

    def writing_client_of(self, path: str, by_fsspec: Requests) -> ObstoreClient | None:
        """Return the obstore client for writing the object, if the server is known to accept its objects; else None."""
        client = self.client_of(path)
        return client if client is not None and (client.has_written or self._probe(client, path, by_fsspec)) else None

    def read(self, path: str, begin: int, targets: Sequence[memoryview]) -> Exception | None:
        """Fill several targets, one after the other, with the bytes from ``begin`` on; return the error, or None."""
        client = self.client_of(path)
        if client is None:
            return NotSuitableError()
        try:
            client.read(path, begin, targets)
        except Exception as error:  # noqa: BLE001 - fsspec's client repeats the request, and its error is reported
            return error
        return None

    def avoid(self, path: str, failure: Exception) -> None:
        """Stop using obstore if it has never read from this server; called when the client of fsspec has just read."""
        client, identity = self.client_of(path), self._identity_of(path)
        if client is not None and identity is not None and not client.has_read:
            self._give_up(identity, path, failure)

    def _identity_of(self, path: str) -> str | None:
        if self._backend == "fsspec":
            return None
        if self._kind is None:
            if self._backend == "obstore":
                raise StorageError(
                    f"obstore does not know {path.partition('://')[0]}://",
                    path=self._secrets.hide(path),
                    remedy='leave out storage_options["backend"]',
                )
            return None
        return repr((self._filesystem.split_path(path)[0], self._backend, self._options))

    def _give_up(self, identity: str, path: str, error: Exception) -> None:
        shown = self._secrets.hide(path.partition("://")[0] + "://" + self._filesystem.split_path(path)[0])
        if isinstance(error, NotSuitableError):
            why = str(error)
        else:
            why = describer(self._secrets, "read", path)(error).message
        if self._backend == "obstore":
            remedy = 'leave out storage_options["backend"]'
            raise StorageError(f"obstore cannot be used: {why}", path=shown, remedy=remedy) from None
        self._known[identity] = None
        if (shown, why) not in _LOGGED:
            _LOGGED.add((shown, why))
            logger.info("fsspec's client moves the bytes of %s, and not obstore, which is faster: %s", shown, why)

    def _probe(self, client: ObstoreClient, path: str, by_fsspec: Requests) -> bool:
        """Return whether the server accepts an object from obstore and returns a range of it; leave nothing behind."""
        probe = f"{path.rpartition('/')[0]}/{PROBE_PREFIX}{uuid.uuid4().hex}"
        data, found = os.urandom(64), bytearray(32)
        failure: Exception | None = None
        try:
            client.put(probe, data, once=True)
            client.read(probe, 16, [memoryview(found)])
        except Exception as error:  # noqa: BLE001 - logged below
            failure = error
        if failure is None and found != data[16:48]:
            failure = OSError("the server has sent another range than it was asked for")
        try:
            if failure is not None:
                by_fsspec.put(probe, data)
                by_fsspec.fetch(probe, 16, 48)
            by_fsspec.delete(probe)
        except CheckpointError:
            return False  # not obstore's fault: the write that follows, by fsspec's client, raises the error
        client.has_written = failure is None
        identity = self._identity_of(path)
        if failure is not None and identity is not None:
            self._give_up(identity, path, failure)
        return client.has_written
