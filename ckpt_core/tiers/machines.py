"""Snapshots in the memory of several machines: each keeps what its ranks write, and a copy of its neighbour's part.

Ranks write into the memory of their own machine. Before rank 0 commits, each machine fetches the files of the previous
machine, and then each gets the manifest: so a snapshot is whole as long as no two neighbours are lost. A snapshot that
is one file, which one rank writes, is fetched by the next machine before it counts as committed. For reading, the
memories are one storage: a file that is not on this machine is requested from the others. Its contents are checked
against the snapshot's digests, wherever they came from.

One process of each machine serves its memory, on threads, to clients that know the secret of the run's store. Nothing
is encrypted, as between ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from ckpt_core._commit.announcement import decode_error, encode_error
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError, StorageError
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage import FileInfo, FileReader, FileWriter
from ckpt_core.storage.base import write_from
from ckpt_core.storage.in_memory import MemoryStorage

_ANSWER_SECONDS = 30
_COPY_SECONDS = 600  # as long as ranks wait for each other's part of a save
_CONNECT_SECONDS = 10.0
_PAUSE_SECONDS = 0.1  # after a connection that could not be accepted
_THREADS = 64
_PIECE_BYTES = 16 * 2**20
_LONGEST_REQUEST = 64 * 2**20  # bytes; a "publish" request contains a manifest


class Machine(NamedTuple):
    """The address at which a machine serves its memory."""

    host: str  # host name or IP address
    port: int  # TCP port


def address_towards(host: str) -> str:
    """Return this machine's address on the network over which it reaches ``host``."""
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])


class MemoryServer:
    """Serves the snapshots in this machine's memory, and no file outside ``directory``, to the other machines.

    It runs on daemon threads until :meth:`close` or the end of the process. ``key`` is the secret that clients must
    know. ``host`` is a machine that all can reach: if it ``is_here``, the server listens on it, otherwise on this
    machine's address in the network of ``host``.
    """

    def __init__(self, directory: str, key: bytes, host: str, *, is_here: bool) -> None:
        self._directory, self._key = directory, key
        self._storage = MemoryStorage(directory)
        try:
            host = host if is_here else address_towards(host)
            try:
                at, family = host, socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
            except ValueError:  # a host name, which may resolve differently on other machines
                at, family = "", socket.AF_INET
            self._socket = socket.create_server((at, 0), family=family)
        except OSError as error:
            raise StorageError(
                f"this machine cannot serve its snapshots to the others: {error}",
                path=directory,
                remedy=f"see whether {host} is known here, or train without memory_every_n_steps",
                errno=error.errno,
            ) from error
        self.machine = Machine(host, self._socket.getsockname()[1])  # the address for the other machines
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, name="ckpt-memory", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:  # out of descriptors, or the client is gone: try again
                if self._is_closed.wait(_PAUSE_SECONDS):
                    return
                continue
            try:
                threading.Thread(target=self._serve, args=(accepted,), name="ckpt-memory", daemon=True).start()
            except RuntimeError:  # no thread could be started
                accepted.close()

    def _serve(self, accepted: socket.socket) -> None:
        try:
            with _connection(accepted, _ANSWER_SECONDS) as caller:
                deliver_challenge(caller, self._key)
                answer_challenge(caller, self._key)
                request = json.loads(caller.recv_bytes(_LONGEST_REQUEST))
                try:
                    answer = self._do(**request)
                except (CheckpointError, OSError) as error:
                    caller.send_bytes(json.dumps({"error": encode_error(error)}).encode())
                    return
                if isinstance(answer, bytes):
                    caller.send_bytes(b"{}")
                    caller.send_bytes(answer)
                else:
                    caller.send_bytes(json.dumps({"value": answer}).encode())
        except Exception:  # noqa: BLE001 - a stranger, or a client that is gone; the caller reports what matters
            return

    def _do(self, do: str, path: str, **about: Any) -> Any:
        if os.path.normpath(path) != path or not path.startswith(f"{self._directory}/"):
            raise StorageError("the requested file is not a snapshot in memory", path=path)
        action: Callable[..., Any] = getattr(self, f"_do_{do}")
        return action(path, **about)

    def _do_size(self, path: str) -> int | None:
        return os.path.getsize(path) if os.path.isfile(path) else None

    def _do_read(self, path: str, offset: int, size: int) -> bytes:
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)

    def _do_exists(self, path: str) -> bool:
        return self._storage.exists(path)

    def _do_list(self, path: str) -> Any:
        return [dataclasses.asdict(info) for info in self._storage.list(path)]

    def _do_subdirectories(self, path: str) -> Any:
        return self._storage.subdirectories(path)

    def _do_files(self, path: str) -> list[tuple[str, int]]:
        found = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        return [(os.path.relpath(file, path), os.path.getsize(file)) for file in found]

    def _do_copy(self, path: str, token: str, files: list[tuple[str, int]], host: str, port: int) -> None:
        """Fetch files of an unfinished snapshot from another machine."""
        # The ranks of this machine hold locks on the staging directory, so that it is not taken for an orphan.
        staging = self._storage.begin_directory(path, token)
        try:
            for name, size in files:
                self._do_fetch(f"{staging}/{name}", size, host, port)
        finally:
            self._storage.leave_directory(path, token)

    def _do_fetch(self, path: str, size: int, host: str, port: int) -> None:
        """Fetch a file from another machine."""
        write_from(_RemoteReader(_Client(Machine(host, port), self._key), path, size), self._storage, path)

    def _do_publish(self, path: str, token: str, manifest: str) -> None:
        self._storage.publish_directory(path, token, manifest.encode())


class _Client:
    """Sends requests to one machine, each on a connection of its own, so that a broken one does not affect others."""

    def __init__(self, machine: Machine, key: bytes) -> None:
        self.machine = machine
        self._key = key

    def ask(self, do: str, path: str, seconds: int = _ANSWER_SECONDS, **about: Any) -> Any:
        """Send a request, and return the value of the answer."""
        return self._asked(do, path, seconds, about)[0]

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return bytes of a file."""
        return self._asked("read", path, _ANSWER_SECONDS, {"offset": offset, "size": size}, has_bytes=True)[1]

    def _asked(
        self, do: str, path: str, seconds: int, about: dict[str, Any], *, has_bytes: bool = False
    ) -> tuple[Any, bytes]:
        try:
            with _connection(socket.create_connection(self.machine, _CONNECT_SECONDS), seconds) as peer:
                answer_challenge(peer, self._key)
                deliver_challenge(peer, self._key)
                peer.send_bytes(json.dumps({"do": do, "path": path, **about}).encode())
                answer = json.loads(peer.recv_bytes())
                if "error" in answer:
                    raise decode_error(answer["error"])
                return answer.get("value"), peer.recv_bytes() if has_bytes else b""
        except CheckpointError:
            raise
        except Exception as error:
            raise StorageError(
                f"the machine at {self.machine.host}:{self.machine.port} does not serve its snapshots: {error}",
                path=path,
                remedy="check that it is running, and that the firewall lets ranks connect to each other",
            ) from error


def _connection(connected: socket.socket, seconds: int) -> Connection:
    connected.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


class _RemoteReader(FileReader):
    request_bytes = 2**18

    def __init__(self, client: _Client, path: str, size: int) -> None:
        self.path, self.size, self._client = path, size, client

    def read_into(self, offset: int, target: memoryview) -> None:
        for begin in range(0, len(target), _PIECE_BYTES):
            piece = target[begin : begin + _PIECE_BYTES]
            data = self._client.read(self.path, offset + begin, len(piece))
            if len(data) != len(piece):
                raise CheckpointCorruptedError("a file of the snapshot ends too early", path=self.path)
            piece[:] = data

    def close(self) -> None:
        """Nothing is open."""


class MachinesStorage(MemoryStorage):
    """The memories of all machines of a run as one storage. It reads from all, and creates and deletes on this one.

    A commit copies files to other machines, as described above. ``directory`` contains the snapshots and the files that
    belong to them, at the same path on all machines. ``mine`` is the index of this machine in ``machines``, which have
    the same order everywhere. ``key`` is the secret that clients must know. ``snapshots`` is the directory of snapshots
    that are single files.
    """

    def __init__(
        self, directory: str, machines: Sequence[Machine], mine: int, key: bytes, snapshots: str | None = None
    ) -> None:
        super().__init__(directory)
        self._clients = [_Client(machine, key) for machine in machines]
        self._mine, self._snapshots = mine, snapshots

    def create(self, path: str, expected_size: int) -> FileWriter:
        writer = super().create(path, expected_size)
        if os.path.dirname(path) == self._snapshots:  # a snapshot that is one file, not a file inside a directory
            stock = writer.commit

            def commit(size: int) -> None:
                stock(size)
                host, port = self._clients[self._mine].machine
                partner = self._clients[(self._mine + 1) % len(self._clients)]
                partner.ask("fetch", path, _COPY_SECONDS, size=size, host=host, port=port)

            writer.commit = commit  # type: ignore[method-assign]
        return writer

    @property
    def _others(self) -> list[_Client]:
        return [client for index, client in enumerate(self._clients) if index != self._mine]

    def open(self, path: str) -> FileReader:
        if not os.path.lexists(path):
            for client in self._others:
                size = client.ask("size", path)
                if size is not None:
                    return _RemoteReader(client, path, size)
        return super().open(path)

    def exists(self, path: str) -> bool:
        return super().exists(path) or any(client.ask("exists", path) for client in self._others)

    def list(self, directory: str) -> Sequence[FileInfo]:
        found = {info.path: info for info in super().list(directory)}
        for client in self._others:
            for info in client.ask("list", directory):
                found.setdefault(info["path"], FileInfo(**info))
        return list(found.values())

    def subdirectories(self, directory: str) -> Sequence[str]:
        theirs = [path for client in self._others for path in client.ask("subdirectories", directory)]
        return list(dict.fromkeys([*super().subdirectories(directory), *theirs]))

    def publish_directory(self, path: str, token: str, manifest: bytes, *, gone: Sequence[str] = ()) -> None:
        staging = self.begin_directory(path, token)
        try:
            count, threads = len(self._clients), min(len(self._clients), _THREADS)
            files: dict[int, Any] = {}

            def look(index: int) -> None:
                files[index] = self._clients[index].ask("files", staging)

            def copy(index: int) -> None:
                host, port = self._clients[index].machine
                partner = self._clients[(index + 1) % count]
                partner.ask("copy", path, _COPY_SECONDS, token=token, files=files[index], host=host, port=port)

            def publish(client: _Client) -> None:
                client.ask("publish", path, _COPY_SECONDS, token=token, manifest=manifest.decode())

            run_parallel(look, range(count), threads=threads)  # before any machine has copies of another's files
            run_parallel(copy, range(count), threads=threads)
            run_parallel(publish, self._others, threads=threads)
            super().publish_directory(path, token, manifest, gone=gone)
        finally:
            self.leave_directory(path, token)
