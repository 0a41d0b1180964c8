"""Which client moves the bytes: obstore where it can, and fsspec's own client where it cannot, logged once."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import stamina
import torch

from ckpt_core import Checkpointer, StorageError
from ckpt_core.storage import fsspec_storage, obstore_choice, obstore_client, storage_for
from ckpt_core.storage.base import REMOTE_REQUEST_BYTES
from ckpt_core.storage.obstore_client import ObstoreClient
from ckpt_core.storage.uploads import ObstoreWriter, S3Writer, StreamWriter
from tests.ckpt_core.storage.test_s3_tls import certificate
from tests.support.fault_proxy import FOREIGN, HttpFault, start_proxy
from tests.support.interrupting import at_every_moment
from tests.support.servers import ACCESS_KEY, SECRET_KEY, Server, start_rclone
from tests.support.stores import read, write

ServerOf = Callable[[str], Server]
CONTENT = os.urandom(11 * 2**20)  # three parts of the smallest size that S3 takes

pytest.importorskip("obstore")


def test_pauses_between_attempts_to_write_grow() -> None:
    # A pause is drawn between the first one and ``base`` times the last: its mean logarithm grows by log(base) - 1.
    assert math.log(obstore_client._WRITING["backoff"]["base"]) > 1


@pytest.fixture(autouse=True)
def _small_parts_and_no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("ckpt_core.storage.uploads.PART_BYTES", 5 * 2**20)
    monkeypatch.setattr(obstore_choice, "_LOGGED", set())
    stamina.set_testing(True, attempts=4, cap=True)
    yield
    stamina.set_testing(False)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that fsspec's client has read."""
    ranges: list[tuple[int, int]] = []
    fetch = fsspec_storage.FsspecStorage.fetch

    def noted(self: Any, path: str, begin: int, end: int) -> bytes:
        ranges.append((begin, end))
        return fetch(self, path, begin, end)

    monkeypatch.setattr(fsspec_storage.FsspecStorage, "fetch", noted)
    return ranges


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "and not obstore" in record.getMessage()]


@pytest.mark.sampled(3)
@pytest.mark.extended_cells("ceph-ObstoreWriter-")
@pytest.mark.parametrize(
    ("place", "writes", "why"),
    [
        ("moto", ObstoreWriter, ""),
        ("ceph", ObstoreWriter, ""),
        ("azurite", ObstoreWriter, ""),
        ("rclone", S3Writer, "non-partial response"),
        ("gcs", StreamWriter, "endpoint_url"),
        ("moto fsspec", S3Writer, None),
        ("azurite fsspec", StreamWriter, None),
    ],
)
def test_who_moves_the_bytes(
    place: str,
    writes: type,
    why: str | None,
    server_of: ServerOf,
    fetched: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ckpt_core")
    kind, _, backend = place.partition(" ")
    server = server_of(kind)
    root = f"{server.new_bucket()}/runs"
    options = {**server.options, **({"backend": backend} if backend else {})}
    content = CONTENT if kind != "gcs" else CONTENT[: 3 * 2**20]
    for number in range(2):
        storage: Any = storage_for(root, options)
        fetched.clear()
        assert type(write(storage, f"{root}/{number}", content)) is writes
        assert bool(fetched) == (place == "rclone" and number == 0), "the probe"
        fetched.clear()
        assert read(storage, f"{root}/{number}") == content
        assert bool(fetched) == (writes is not ObstoreWriter)
        assert len(storage.hidden_objects(root, "")) == len(storage.list(root)) == number + 1, "the probe is gone"
    messages = told(caplog)
    assert len(messages) == bool(why)
    assert not why or why in messages[0]


def test_who_only_reads_writes_nothing_and_finds_out_too(
    server_of: ServerOf, fetched: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_core")
    for kind in ("moto", "rclone"):
        server = server_of(kind)
        path = f"{server.new_bucket()}/a"
        write(storage_for(path, {**server.options, "backend": "fsspec"}), path, CONTENT)
        fetched.clear()
        with start_proxy(server.endpoint) as proxy:
            storage: Any = storage_for(path, dict(server.through(proxy.endpoint).options))
            for _ in range(2):
                assert read(storage, path) == CONTENT
            assert {request.split()[0] for request in proxy.requests} <= {"GET", "HEAD"}
        assert len(fetched) == (2 if kind == "rclone" else 0)
    (message,) = told(caplog)
    assert "non-partial response" in message


def test_without_obstore_fsspecs_client_does_it(fork_script: Any, server_of: ServerOf, tmp_path: Path) -> None:
    (tmp_path / "obstore.py").write_text("raise ImportError('not here')\n")
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    script = f"""
        import logging
        logging.basicConfig(level=logging.INFO)
        from ckpt_core import StorageError
        from ckpt_core.storage import storage_for
        from tests.support.stores import read, write
        storage = storage_for({path!r}, {dict(server.options)!r})
        print(type(write(storage, {path!r}, b"abc")).__name__, read(storage, {path!r}))
        try:
            storage_for({path!r}, {dict(server.options)!r} | {{"backend": "obstore"}})
        except StorageError as error:
            print(error)
    """
    done = fork_script(script, env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"})
    assert "S3Writer b'abc'" in done.stdout
    assert "obstore cannot be used: it is not installed" in done.stdout
    assert done.stderr.count("and not obstore") == 1


def test_a_fork_of_a_process_that_has_used_obstore(fork_script: Any, server_of: ServerOf) -> None:
    """The forked process has no threads of obstore: every request would hang."""
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    script = f"""
        import logging, os
        logging.basicConfig(level=logging.INFO)
        from ckpt_core import StorageError
        from ckpt_core.storage import storage_for
        from tests.support.stores import read, write
        options = {dict(server.options)!r}
        storage = storage_for({path!r}, options)
        print(type(write(storage, {path!r}, b"parent")).__name__, flush=True)
        if os.fork() == 0:
            again = storage_for({path!r}, options)
            print(read(again, {path!r}), type(write(again, {path!r}, b"child")).__name__, flush=True)
            try:
                storage_for({path!r}, options | {{"backend": "obstore"}})
            except StorageError as error:
                print(error.message, flush=True)
            os._exit(0)
        os.wait()
        print(read(storage, {path!r}), flush=True)
    """
    done = fork_script(script)
    assert done.stdout.splitlines()[:2] == ["ObstoreWriter", "b'parent' S3Writer"]
    assert "forked process" in done.stdout.splitlines()[2]
    assert done.stdout.splitlines()[3] == "b'child'"
    assert done.stderr.count("and not obstore") == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, "s3_additional_kwargs"),
        ({"requester_pays": True}, "requester_pays"),
        ({"config_kwargs": {"proxies": {"http": "http://127.0.0.1:9"}}}, "config_kwargs['proxies']"),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, "config_kwargs['s3']"),
        ({"config_kwargs": {"signature_version": "s3"}}, "config_kwargs['signature_version']"),
    ],
)
def test_settings_that_obstore_does_not_follow(
    options: dict[str, Any], why: str, server_of: ServerOf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_core")
    path = f"{server_of('moto').new_bucket()}/a"
    both = {**server_of("moto").options, **options}
    storage: Any = storage_for(path, both)
    assert storage.obstore.client_of(path) is None
    assert why in told(caplog)[0]
    with pytest.raises(StorageError, match="obstore cannot be used: it does not follow"):
        storage_for(path, {**both, "backend": "obstore"})


def test_a_proxy_of_the_environment(server_of: ServerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    options = {**server.options, "backend": "obstore", "default_block_size": 2**20}  # a new client, not a cached one
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    with pytest.raises(StorageError, match="a proxy in the environment"):
        storage_for(path, options)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    storage_for(path, options)


@pytest.mark.extended
def test_credentials_are_those_that_s3fs_finds(
    server_of: ServerOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of("ceph")  # this server checks credentials
    path = f"{server.new_bucket()}/a"
    (tmp_path / "credentials").write_text(
        f"[run]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    (tmp_path / "config").write_text(f"[profile run]\nregion = us-east-1\nendpoint_url = {server.endpoint}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    storage: Any = storage_for(path, {"profile": "run", "backend": "obstore"})
    assert type(write(storage, path, CONTENT)) is ObstoreWriter
    assert read(storage, path) == CONTENT
    # Credentials from the environment; and then none at all, which is an error.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    options = {"endpoint_url": server.endpoint, "backend": "obstore"}
    assert read(storage_for(path, options), path) == CONTENT
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="there are no credentials"):
        storage_for(path, {**options, "default_block_size": 2**20})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"endpoint_url": "https://store.example.org"},
            {"endpoint": "https://store.example.org", "unsigned_payload": True},
        ),
        (
            {"endpoint_url": "http://store.example.org"},
            {"endpoint": "http://store.example.org", "unsigned_payload": False},
        ),
        ({"config_kwargs": {"s3": {"payload_signing_enabled": True}}}, {"endpoint": None, "unsigned_payload": False}),
        ({"use_ssl": False, "config_kwargs": {"s3": {"payload_signing_enabled": False}}}, {"unsigned_payload": True}),
        ({"client_kwargs": {"region_name": "eu-west-1"}}, {"endpoint": None, "region": "eu-central-1"}),
        ({"anon": True}, {"skip_signature": True, "access_key_id": None}),
    ],
)
def test_what_obstore_is_told(
    options: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    filesystem = s3fs.S3FileSystem(key="k", secret="s", skip_instance_cache=True, **options)
    answer = {"ResponseMetadata": {"HTTPHeaders": {"x-amz-bucket-region": "eu-central-1"}}}
    monkeypatch.setattr(filesystem, "call_s3", lambda *_, **__: answer)
    config = obstore_client._s3_settings(filesystem, "bucket")["config"]
    assert {name: config.get(name) for name in expected} == expected


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    trusted = certificate(tmp_path / "certificate.pem")
    (tmp_path / "server").mkdir()
    with start_rclone(tmp_path / "server", trusted) as server:
        path = f"{server.new_bucket()}/a"
        options = {name: value for name, value in server.options.items() if name != "client_kwargs"}

        def put(**settings: Any) -> None:
            storage: Any = storage_for(path, {**options, **settings, "retry_config": {"max_retries": 0}})
            storage.obstore.client_of(path).put(path, b"abc")

        put(client_kwargs={"verify": False})
        with pytest.raises(Exception, match="error sending request"):
            put()
        for named in ({"client_kwargs": {"verify": str(trusted)}}, {}):
            monkeypatch.setenv("AWS_CA_BUNDLE", str(trusted))
            storage: Any = storage_for(path, {**options, **named, "default_block_size": 2**21})
            assert type(write(storage, path, CONTENT)) is S3Writer, "obstore cannot be given certificates"
            assert read(storage, path) == CONTENT


def test_a_name_that_obstore_would_change(server_of: ServerOf) -> None:
    server = server_of("moto")
    bucket = server.new_bucket()
    storage: Any = storage_for(bucket, dict(server.options))
    for name, writer in (("a/./b", S3Writer), ("a//b", S3Writer), ("ä b+c%20=&?'(é)", ObstoreWriter)):
        assert type(write(storage, f"{bucket}/{name}", CONTENT)) is writer
        assert read(storage, f"{bucket}/{name}") == CONTENT
        found = storage._filesystem.call_s3("list_objects_v2", Bucket=bucket[5:], Prefix=name)
        assert [entry["Key"] for entry in found["Contents"]] == [name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
@pytest.mark.parametrize("size", [0, 1, 5 * 2**20 - 1, 5 * 2**20, 5 * 2**20 + 1, 11 * 2**20])
def test_pieces_of_any_size(backend: str, size: int, server_of: ServerOf) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    storage = storage_for(path, {**server.options, "backend": backend})
    for piece in (100_000, 3 * 2**20, 7 * 2**20):
        memory = bytearray(piece)  # reused at once
        writer = storage.create(path, size)
        for begin in range(0, size, piece):
            part = CONTENT[begin : min(begin + piece, size)]
            memory[: len(part)] = part
            writer.write_at(begin, memoryview(memory)[: len(part)])
        assert not storage.exists(path)
        writer.commit(size)
        writer.abort()
        assert read(storage, path) == CONTENT[:size]
        storage.remove(path)


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
def test_memory_does_not_grow_with_the_object(backend: str, server_of: ServerOf) -> None:
    server = server_of("ceph")
    path = f"{server.new_bucket()}/a"
    storage = storage_for(path, {**server.options, "backend": backend})
    part = 5 * 2**20
    window = memoryview(bytearray(part))
    writer = storage.create(path, 30 * part)
    tracemalloc.start()
    try:
        for number in range(30):
            writer.write_at(number * part, window)
        writer.commit(30 * part)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 15 * part, "half the object: six under way, and what waits to be released"


@pytest.mark.parametrize("writer", [ObstoreWriter, S3Writer])
def test_parts_are_as_large_as_the_number_of_parts_demands(writer: Any) -> None:
    class Filesystem:
        def split_path(self, path: str) -> tuple[str, str, None]:
            return "bucket", path, None

    arguments: Any = (Filesystem(), "a", 10**12, None, lambda *_: None)
    more = (lambda *_: None,) if writer is ObstoreWriter else ()
    part_bytes = writer(*arguments, *more)._part_bytes
    assert part_bytes % (5 * 2**20) == 0
    assert 10**12 < part_bytes * 10_000 < 1.2 * 10**12


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_read_that_fails_is_made_again_by_fsspecs_client(server_of: ServerOf, fetched: list[Any]) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    with start_proxy(server.endpoint) as proxy:
        storage: Any = storage_for(path, dict(server.through(proxy.endpoint).options))
        write(storage, path, CONTENT[:1000])
        for kind in ("503", "reset", "cut reply", *FOREIGN):
            fetched.clear()
            proxy.plan(HttpFault(kind, 2))  # the first request asks for the size
            assert read(storage, path) == CONTENT[:1000]
            assert len(proxy.requests) >= 3
            assert bool(fetched) == (kind in FOREIGN), "what is not the store's answer, obstore does not ask for again"
        fetched.clear()
        proxy.plan(None)
        assert read(storage, path) == CONTENT[:1000]
        assert fetched == [], "obstore is used again"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [len(CONTENT), 3 * 2**20], ids=["parts", "one request"])
@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
def test_what_is_sent_again_is_sent_whole(backend: str, size: int, server_of: ServerOf) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    direct = storage_for(path, dict(server.options))
    with start_proxy(server.endpoint) as proxy:
        faulty = storage_for(path, {**server.through(proxy.endpoint).options, "backend": backend})

        def upload() -> list[str]:
            write(faulty, path, CONTENT[:size])
            return [request for request in proxy.requests if request.startswith("PUT")]

        upload()  # the first upload takes more requests
        proxy.plan(None)
        sent = upload()
        requests = list(proxy.requests)
        assert len(sent) == (3 if size > 5 * 2**20 else 1)
        for kind in ("503", "lost reply"):
            for number, request in enumerate(requests, 1):
                if request.startswith("PUT"):
                    proxy.plan(HttpFault(kind, number))
                    assert len(upload()) > len(sent)
                    assert read(direct, path) == CONTENT[:size], (kind, request)


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("fsspec-parts")
@pytest.mark.parametrize("size", [len(CONTENT), 3 * 2**20], ids=["parts", "one request"])
@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
def test_an_answer_in_the_place_of_the_stores_is_no_answer(backend: str, size: int, server_of: ServerOf) -> None:
    """When a proxy answers 200 in place of the store, no checkpoint counts as saved that is not there."""
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    direct = storage_for(path, dict(server.options))
    with start_proxy(server.endpoint) as proxy:
        faulty = storage_for(path, {**server.through(proxy.endpoint).options, "backend": backend})
        write(faulty, path, CONTENT[:size])
        proxy.plan(None)
        write(faulty, path, CONTENT[:size])
        count = len(proxy.requests)
        content = CONTENT[:size]
        refused = 0
        for kind in FOREIGN:
            for number in range(1, count + 1):
                before, content = content, os.urandom(size)
                proxy.plan(HttpFault(kind, number))
                try:
                    write(faulty, path, content)
                except StorageError:
                    # obstore does not ask again, but notices the wrong answer; what the last request did is unknown.
                    assert backend == "obstore"
                    refused += 1
                    content = before if number < count else read(direct, path)
                assert read(direct, path) == content, (kind, number)
            proxy.plan(HttpFault(kind, 1, for_good=True))
            with pytest.raises(StorageError):
                write(faulty, path, os.urandom(size))
            proxy.plan(None)
            assert read(direct, path) == content
        assert bool(refused) == (backend == "obstore" and size > 5 * 2**20)


def test_an_object_of_another_length_is_noticed(server_of: ServerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    storage: Any = storage_for(path, dict(server.options))
    begin = ObstoreClient.begin

    class LosesHalf:
        def __init__(self, file: Any) -> None:
            self.file = file
            self.close = file.close

        def write(self, data: memoryview) -> None:
            self.file.write(data if len(data) == 5 * 2**20 else data[: len(data) // 2])

    monkeypatch.setattr(ObstoreClient, "begin", lambda *arguments, once: LosesHalf(begin(*arguments, once=once)))
    with pytest.raises(StorageError, match=f"has {len(CONTENT) - 2**19} bytes of the object, but {len(CONTENT)}"):
        write(storage, path, CONTENT)


# ---- a server that knows no ranges -----------------------------------------------------------------------------------


class Whole(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if self.command == "GET":
            self.server.asked.append(self.headers.get("Range"))  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):  # the client closes the connection once it has seen enough
                self.wfile.write(CONTENT)
        self.close_connection = True

    do_HEAD = do_GET  # noqa: N815 - the base class looks for it

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_a_server_that_knows_no_ranges() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Whole)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        options = {"anon": True, "endpoint_url": f"http://127.0.0.1:{server.server_address[1]}"}
        memory = bytearray(3 * REMOTE_REQUEST_BYTES)
        with storage_for("s3://bucket/a", options).open("s3://bucket/a") as reader:
            for begin in (7, 5000):
                reader.read_into(begin, memoryview(memory)[:1000])
                assert memory[:1000] == CONTENT[begin : begin + 1000]
        assert memory[1000:] == bytes(len(memory) - 1000), "nothing is written behind the end"
        assert len(server.asked) == 2, "by obstore, and once by fsspec's client"  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_a_checkpoint_is_read_as_it_was_saved(server_of: ServerOf, fetched: list[Any]) -> None:
    server = server_of("ceph")
    path = f"{server.new_bucket()}/a.ckpt"
    state = {"w": torch.randn(10 * 2**20), "b": torch.randn(1000)}
    with Checkpointer(strategy="sync", storage_options=dict(server.options)) as checkpointer:
        checkpointer.save(state, path)
        found = checkpointer.load(path)
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["b"], state["b"])
    assert fetched == []


# ---- credentials that are renewed
# ----------------------------------------------------------------------------------------


def asked_by(protocol: str, filesystem: Any) -> list[str]:
    """Return the authorization that obstore sends with the credentials of ``filesystem``, to a server that refuses."""
    seen: list[str] = []

    class Refuses(Whole):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        from obstore.store import AzureStore, GCSStore

        settings = {"az": obstore_client._azure_settings, "gs": obstore_client._gcs_settings}[protocol]
        arguments = settings(filesystem, "bucket")
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        arguments["config"] |= {"endpoint" if protocol == "az" else "base_url": endpoint}
        store: Any = {"az": AzureStore, "gs": GCSStore}[protocol]
        client = store("bucket", client_options={"allow_http": True}, retry_config={"max_retries": 0}, **arguments)
        with pytest.raises(Exception, match="403"):
            client.get_range("a", start=0, length=2)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    return seen


def test_an_identity_of_azure() -> None:
    class Identity:
        def get_token(self, scope: str) -> Any:
            assert scope == "https://storage.azure.com/.default"
            return type("Token", (), {"token": "of-azure", "expires_on": 4_000_000_000})

    client = type("Client", (), {"url": "https://me.blob.example.org/", "account_name": "me", "credential": object()})
    filesystem = type("Filesystem", (), {"service_client": client, "sync_credential": Identity()})
    assert asked_by("az", filesystem) == ["Bearer of-azure"]


def test_credentials_of_google() -> None:
    class Credentials:
        credentials: Any = None

        def maybe_refresh(self) -> None:
            expiry = datetime.datetime(2090, 1, 1)
            self.credentials = type("Fresh", (), {"token": "of-google", "expiry": expiry})

    found = Credentials()
    found.credentials = object()
    filesystem = type("Filesystem", (), {"credentials": found, "requester_pays": False, "_endpoint": None})
    assert asked_by("gs", filesystem) == ["Bearer of-google"]


@pytest.mark.extended
def test_a_signal_handler_saves_while_the_client_of_a_server_is_made(server_of: ServerOf) -> None:
    server = server_of("moto")
    root = f"{server.new_bucket()}/runs"
    storage: Any = storage_for(root, server.options)
    saves = 0

    def handler() -> None:
        nonlocal saves
        saves += 1
        write(storage, f"{root}/handler", b"handler")

    def save() -> None:
        for shared in fsspec_storage._SHARED.values():
            shared.clients.clear()
        write(storage, f"{root}/outer", b"outer")

    for run in at_every_moment(("obstore_choice.py",), handler, opcodes=False):
        run(save)
    assert saves > 5
    assert [read(storage, f"{root}/{name}") for name in ("handler", "outer")] == [b"handler", b"outer"]
