"""Whichever request of a save, load or removal fails, once or for good: the old file or the new one, whole."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stamina
import torch

from ckpt_core import Checkpointer, CheckpointError, StorageError
from ckpt_core.storage import Storage, storage_for
from ckpt_core.storage.fsspec_storage import FsspecStorage
from ckpt_core.storage.retry import Retries
from tests.support.fault_proxy import FAULTS, FaultProxy, HttpFault, start_proxy
from tests.support.servers import Server
from tests.support.states import assert_same_state, tensor_of
from tests.support.stores import unfinished_uploads

pytestmark = pytest.mark.slow

ServerOf = Callable[[str], Server]
OLD = {"w": tensor_of(torch.uint8, 100_000), "step": 1}
NEW = {"w": tensor_of(torch.uint8, 11 * 2**20), "step": 2}  # three parts of the smallest size that S3 takes
# Enough kinds for a client that pauses between attempts, whatever its options, and for a server with its own pace.
KINDS = {
    "moto": FAULTS,
    "moto fsspec": FAULTS,
    "ceph": ("503", "reset", "lost reply", "cut reply"),
    "ceph fsspec": ("503", "reset", "lost reply", "cut reply"),
    "azurite": ("500", "503", "reset", "lost reply"),
    "rclone": ("lost reply",),  # unlike the others, it refuses to complete an upload that is completed already
}


class Scene:
    """A server, a proxy in front of it, and an old checkpoint."""

    def __init__(self, server: Server, proxy: FaultProxy, options: dict[str, Any]) -> None:
        self.root = f"{server.new_bucket()}/runs"
        self.path = f"{self.root}/a.ckpt"
        self.proxy = proxy
        self.direct = storage_for(self.root, dict(server.options))
        self.faulty = storage_for(self.root, options)
        self.save(OLD, self.direct)
        self.load(self.faulty)  # the store has answered once, without a fault

    def save(self, state: Any, storage: Storage) -> None:
        Checkpointer(strategy="sync", storage=storage).save(state, self.path)

    def load(self, storage: Storage) -> Any:
        return Checkpointer(strategy="sync", storage=storage).load(self.path)


@pytest.fixture(autouse=True)
def _small_parts_and_no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("ckpt_core.storage.uploads.PART_BYTES", 5 * 2**20)
    monkeypatch.setattr(FsspecStorage, "abandoned_after_seconds", -1.0)  # a store's clock may count whole seconds
    monkeypatch.setattr(FsspecStorage, "claim", lambda *_: None)  # its requests come at any moment
    stamina.set_testing(True, attempts=4, cap=True)
    yield
    stamina.set_testing(False)


@pytest.fixture(scope="module", params=list(KINDS))
def scene_maker(request: pytest.FixtureRequest, server_of: ServerOf) -> Iterator[Callable[[], Scene]]:
    kind, _, backend = str(request.param).partition(" ")
    server = server_of(kind)
    with start_proxy(server.endpoint) as proxy:
        options = proxied_options(server, proxy, backend)
        yield lambda: Scene(server, proxy, options)


def proxied_options(server: Server, proxy: FaultProxy, backend: str = "") -> dict[str, Any]:
    options: dict[str, Any] = {
        name: value.replace(server.endpoint, proxy.endpoint) if isinstance(value, str) else value
        for name, value in server.options.items()
    }
    # By default, obstore is more patient than the tests.
    options |= {"client_options": {"timeout": "2s"}, "retry_config": {"max_retries": 2}}
    if backend:
        options["backend"] = backend
    return {**options, "config_kwargs": {"read_timeout": 2.0}} if server.protocol == "s3" else options


@pytest.fixture
def scene(scene_maker: Callable[[], Scene]) -> Scene:
    return scene_maker()


def requests_of(scene: Scene, action: Callable[[], object]) -> int:
    """Return how many requests ``action`` takes at least; a connection closed meanwhile may cost another."""
    counts = []
    for _ in range(2):
        scene.proxy.plan(None)
        action()
        counts.append(len(scene.proxy.requests))
    return min(counts)


def kinds_for(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return KINDS[request.node.callspec.params["scene_maker"]]


def test_a_save_survives_any_request_failing_once(scene: Scene, request: pytest.FixtureRequest) -> None:
    count = requests_of(scene, lambda: scene.save(NEW, scene.faulty))
    assert count >= 4, "several parts and their completion"
    for kind in kinds_for(request):
        for number in range(1, count + 1):
            scene.save(OLD, scene.direct)
            scene.proxy.plan(HttpFault(kind, number))
            scene.save(NEW, scene.faulty)
            made = scene.proxy.requests
            # On a busy machine, the count itself may include a request that was repeated.
            assert len(made) > min(count, len(set(made))), f"{kind} at request {number} was not noticed"
            assert_same_state(scene.load(scene.direct), NEW)
            # When the reply to the first request is lost, the client does not know what to abort.
            left = unfinished_uploads(scene.root, scene.direct)
            assert list(scene.direct.remove_orphans(scene.root)) == [scene.path for _ in left]
            assert unfinished_uploads(scene.root, scene.direct) == []


def test_a_load_survives_any_request_failing_once(scene: Scene, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["scene_maker"] == "azurite":
        pytest.skip("Azure's package pauses for 15 seconds before it repeats a read")
    scene.save(NEW, scene.direct)
    count = requests_of(scene, lambda: scene.load(scene.faulty))
    for kind in kinds_for(request):
        for number in range(1, count + 1):
            scene.proxy.plan(HttpFault(kind, number))
            assert_same_state(scene.load(scene.faulty), NEW)


@pytest.mark.parametrize("kind", ["503", "reset"])
def test_a_store_that_goes_away_during_a_save(scene: Scene, kind: str, request: pytest.FixtureRequest) -> None:
    count = requests_of(scene, lambda: scene.save(NEW, scene.faulty))
    if request.node.callspec.params["scene_maker"] in ("moto", "ceph", "azurite"):
        scene.proxy.plan(HttpFault(kind, count, for_good=True))
        scene.save(NEW, scene.faulty)  # obstore has committed, and only looks at what is there
        count -= 1
    for number in range(1, count + 1):
        scene.save(OLD, scene.direct)
        scene.proxy.plan(HttpFault(kind, number, for_good=True))
        with pytest.raises(StorageError) as caught:
            scene.save(NEW, scene.faulty)
        assert caught.value.path == scene.path
        assert "storage_options" in str(caught.value)
        assert_same_state(scene.load(scene.direct), OLD)
        scene.proxy.plan(None)
        scene.save(NEW, scene.faulty)
        assert_same_state(scene.load(scene.direct), NEW)


def is_commit(request: str, state: dict[str, Any]) -> bool:
    """Return whether a request creates the object: the completion of an upload, or the only request of a small one."""
    method, _, rest = request.partition(" ")
    return (method == "POST" and "uploadId" in rest) or (state is OLD and method == "PUT")


@contextlib.contextmanager
def failing(proxy: FaultProxy, fault_of: Callable[[str], str | None]) -> Iterator[None]:
    """Let each request meet the fault that ``fault_of`` returns for it."""
    proxy.fault_of_next = fault_of  # type: ignore[method-assign]
    try:
        yield
    finally:
        del proxy.fault_of_next  # type: ignore[method-assign]


@pytest.mark.parametrize("place", ["moto", "moto fsspec", "ceph", "ceph fsspec"])
@pytest.mark.parametrize("goes_away", [False, True])
def test_a_save_whose_last_answer_is_lost_looks_or_says_so(place: str, goes_away: bool, server_of: ServerOf) -> None:
    kind, _, backend = place.partition(" ")
    server = server_of(kind)
    with start_proxy(server.endpoint) as proxy:
        scene = Scene(server, proxy, proxied_options(server, proxy, backend))
        scene.save(NEW, scene.faulty)
        for state, other in ((NEW, OLD), (OLD, NEW)):
            scene.save(other, scene.direct)
            commits: list[str] = []

            def fault(request: str, *, state: Any = state, commits: list[str] = commits) -> str | None:
                if commits and goes_away:
                    return "503"
                if is_commit(request, state):
                    commits.append(request)
                    return "lost reply"
                return None

            with failing(proxy, fault):
                if goes_away:
                    with pytest.raises(StorageError) as caught:
                        scene.save(state, scene.faulty)
                    assert "`ckpt verify` tells" in str(caught.value)
                    assert "storage_options" in str(caught.value)
                else:
                    scene.save(state, scene.faulty)
            assert commits
            assert_same_state(scene.load(scene.direct), state)


@pytest.mark.parametrize("backend", ["", "fsspec"])
def test_a_commit_that_is_refused_is_not_in_doubt(backend: str, server_of: ServerOf) -> None:
    server = server_of("ceph")
    with start_proxy(server.endpoint) as proxy:
        scene = Scene(server, proxy, proxied_options(server, proxy, backend))
        scene.save(NEW, scene.faulty)
        for state, other in ((NEW, OLD), (OLD, NEW)):
            scene.save(other, scene.direct)

            def fault(request: str, *, state: Any = state) -> str | None:
                return "503" if is_commit(request, state) else None

            with failing(proxy, fault), pytest.raises(StorageError) as caught:
                scene.save(state, scene.faulty)
            assert "ckpt verify" not in str(caught.value), "it was asked, and has the old one"
            assert_same_state(scene.load(scene.direct), other)
            assert unfinished_uploads(scene.root, scene.direct) == []


@pytest.mark.parametrize("kind", ["503", "reset"])
def test_a_store_that_goes_away_during_a_load(server_of: ServerOf, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of("moto")
    with start_proxy(server.endpoint) as proxy:
        scene = Scene(server, proxy, proxied_options(server, proxy))
        scene.save(NEW, scene.direct)
        count = requests_of(scene, lambda: scene.load(scene.faulty))
        for number in range(1, count + 1):
            proxy.plan(HttpFault(kind, number, for_good=True))
            with pytest.raises(StorageError):
                scene.load(scene.faulty)


def test_look_ups_and_removals_survive_any_request_failing_once(server_of: ServerOf) -> None:
    server = server_of("moto")
    with start_proxy(server.endpoint) as proxy:
        scene = Scene(server, proxy, proxied_options(server, proxy))
        actions: dict[str, tuple[Callable[[], object], object]] = {
            "exists": (lambda: scene.faulty.exists(scene.path), True),
            "does not exist": (lambda: scene.faulty.exists(f"{scene.root}/b.ckpt"), False),
            "list": (lambda: [file.path for file in scene.faulty.list(scene.root)], [scene.path]),
            "copy": (lambda: scene.faulty.copy(scene.path, f"{scene.root}/deep/b.ckpt") > 1000, True),
            "orphans": (lambda: list(scene.faulty.remove_orphans(scene.root)), []),
            "remove": (lambda: (scene.faulty.remove(scene.path), scene.direct.exists(scene.path))[1], False),
        }
        for action, expected in actions.values():
            count = requests_of(scene, action)
            for kind in ("500", "reset", "cut reply"):
                for number in range(1, count + 1):
                    scene.save(OLD, scene.direct)
                    proxy.plan(HttpFault(kind, number))
                    assert action() == expected


def test_an_upload_is_aborted_when_a_part_is_refused_for_good(server_of: ServerOf) -> None:
    server = server_of("ceph")
    with start_proxy(server.endpoint) as proxy:
        scene = Scene(server, proxy, proxied_options(server, proxy))
        scene.proxy.plan(None)
        scene.save(NEW, scene.faulty)
        for number, request in enumerate(scene.proxy.requests, 1):
            if "partNumber" in request:
                scene.save(OLD, scene.direct)
                writer = scene.faulty.create(scene.path, 11 * 2**20)
                scene.proxy.plan(HttpFault("503", 2, for_good=True))
                with pytest.raises(StorageError):
                    for begin in range(0, 10 * 2**20, 2**20):
                        writer.write_at(begin, memoryview(bytearray(2**20)))
                    writer.commit(10 * 2**20)
                assert unfinished_uploads(scene.root, scene.direct) == ["runs/a.ckpt"], "it had begun"
                scene.proxy.plan(None)
                writer.abort()
                assert unfinished_uploads(scene.root, scene.direct) == []
                assert_same_state(scene.load(scene.direct), OLD)
                assert number > 1
                return
        raise AssertionError("no part was uploaded")


def test_a_refusal_is_not_repeated(server_of: ServerOf) -> None:
    server = server_of("ceph")  # moto checks no credentials
    with start_proxy(server.endpoint) as proxy:
        options = {**proxied_options(server, proxy), "secret": "not-the-secret-of-this-user"}
        root = server.new_bucket()
        storage = storage_for(root, options)
        with pytest.raises(CheckpointError) as caught:
            storage.open(f"{root}/a.ckpt")
        assert isinstance(caught.value, StorageError), "refused is not the same as absent"
        assert len(proxy.requests) <= 2, proxy.requests
        assert "not-the-secret" not in "".join(traceback.format_exception(caught.value))


def test_a_save_after_a_long_outage_does_not_repeat_what_it_asks(
    server_of: ServerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.storage.retry._CALM", 1e9)  # however slow the machine is
    server = server_of("moto")
    with start_proxy(server.endpoint) as proxy:
        options = {name: v for name, v in proxied_options(server, proxy).items() if name != "retry_config"}
        storage: Any = storage_for(root := server.new_bucket(), options)
        with storage.create(f"{root}/a.ckpt", 4) as writer:
            writer.write_at(0, memoryview(b"good"))
            writer.commit(4)
        storage._retries = Retries(patience=0.0)
        proxy.plan(HttpFault("503", 1, for_good=True))
        with pytest.raises(StorageError):
            storage.exists(f"{root}/a.ckpt")
        with storage.create(f"{root}/b.ckpt", 4) as writer:
            writer.write_at(0, memoryview(b"late"))
            with pytest.raises(StorageError, match="503"):
                writer.commit(4)
        assert len(proxy.requests) <= 3, proxy.requests


def test_pauses_grow_and_are_random(server_of: ServerOf, caplog: pytest.LogCaptureFixture) -> None:
    stamina.set_testing(False)
    server = server_of("moto")
    with start_proxy(server.endpoint) as proxy:
        scene = Scene(server, proxy, proxied_options(server, proxy))
        waits: list[float] = []
        hooks = stamina.instrumentation.get_on_retry_hooks()
        stamina.instrumentation.set_on_retry_hooks([*hooks, lambda details: waits.append(details.wait_for)])
        try:
            with caplog.at_level(logging.INFO, "ckpt_core.storage.retry"):
                proxy.plan(HttpFault("503", 1, for_good=True))
                exists = scene.faulty
                timer = _heal_after(proxy, 4)
                assert exists.exists(scene.path)
        finally:
            stamina.instrumentation.set_on_retry_hooks(hooks)
        records = [record for record in caplog.records if record.name == "ckpt_core.storage.retry"]
        told = [record.getMessage() for record in records]
        assert [line[line.rindex("trying") :] for line in told] == [
            "trying again for at most 300 s",
            *(f"trying again, {n} of 9" for n in range(2, len(told) + 1)),
        ]
        assert [record.levelno for record in records] == [logging.WARNING] + [logging.INFO] * (len(records) - 1)
        assert all(f"Service Unavailable ({scene.path})" in line for line in told), told
        assert len(told) == len(waits)
        assert timer() >= 4
        assert len(waits) >= 3
        assert len({round(wait, 6) for wait in waits}) == len(waits)
        assert all(wait >= 0.2 * 2**attempt for attempt, wait in enumerate(waits))


def _heal_after(proxy: FaultProxy, count: int) -> Callable[[], int]:
    """Let the proxy work again after ``count`` more requests; return a function that counts the requests."""
    inner = proxy.fault_of_next
    seen: list[str] = []

    def fault_of_next(request: str) -> str | None:
        seen.append(request)
        fault = inner(request)
        return fault if len(seen) <= count else None

    proxy.fault_of_next = fault_of_next  # type: ignore[method-assign]
    return lambda: len(seen)
