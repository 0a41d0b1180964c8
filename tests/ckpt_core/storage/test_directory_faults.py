"""Whichever request of a save or load of a directory fails, once or for good: the old one or the new one, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stamina
import torch

from ckpt_core import Catalog, CheckpointError, DirectoryCheckpointer, Kind, Part
from ckpt_core.storage import storage_for
from ckpt_core.storage.fsspec_storage import FsspecStorage
from tests.support.fault_proxy import FaultProxy, HttpFault, start_proxy
from tests.support.servers import Server

pytestmark = pytest.mark.slow

NUMBERS = 50_000  # float32: 200 kB


class Scene:
    """A server, a proxy in front of it, and an old checkpoint."""

    def __init__(self, server: Server, proxy: FaultProxy) -> None:
        self.root = f"{server.new_bucket()}/runs"
        self.path = f"{self.root}/checkpoint"
        self.proxy = proxy
        self.direct = dict(server.options)
        self.faulty = {
            **server.through(proxy.endpoint).options,
            "config_kwargs": {"read_timeout": 2.0},
            "client_options": {"timeout": "2s"},
            "retry_config": {"max_retries": 2},
        }
        self.begin()
        self.value_at(self.faulty)  # the store has answered once, without a fault

    def begin(self) -> None:
        """Leave nothing but the old checkpoint."""
        self.proxy.plan(None)
        storage_for(self.root, self.direct).remove(self.root)
        self.save(1.0, self.direct)

    def save(self, value: float, options: dict[str, Any]) -> None:
        parts = [
            Part("model", {"w": torch.full((NUMBERS,), value)}, Kind.REPLICATED),
            Part("step", {"step": torch.tensor(value)}, Kind.PER_RANK),
        ]
        with DirectoryCheckpointer(strategy="sync", storage_options=options) as checkpointer:
            checkpointer.save(parts, self.path, metadata={"step": int(value)})

    def value_at(self, options: dict[str, Any]) -> float:
        """Return the number in the checkpoint, after checking that all of it is of one save."""
        with DirectoryCheckpointer(storage_options=options).load(self.path) as checkpoint:
            weights, step = checkpoint.load("model")["w"], float(checkpoint.load("step")["step"])
            assert bool((weights == step).all())
            assert weights.shape == (NUMBERS,)
            assert checkpoint.metadata == {"step": int(step)}
            return step

    def value(self) -> float:
        """Return the number in the only checkpoint that is found, after verifying every byte of it."""
        self.proxy.plan(None)
        found = Catalog(self.root, suffix="", storage_options=self.direct).verify()
        assert found == {self.path: None}
        return self.value_at(self.direct)

    def requests_of(self, action: Callable[[], object]) -> int:
        """Return how many requests ``action`` takes at least; a connection closed meanwhile may cost another."""
        counts = []
        for _ in range(2):
            self.begin()
            action()
            counts.append(len(self.proxy.requests))
        return min(counts)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FsspecStorage, "claim", lambda *_: None)  # its requests come at any moment
    stamina.set_testing(True, attempts=4, cap=True)
    yield
    stamina.set_testing(False)


@pytest.fixture
def scene(server_of: Callable[[str], Server]) -> Iterator[Scene]:
    server = server_of("moto")
    with start_proxy(server.endpoint) as proxy:
        yield Scene(server, proxy)


@pytest.mark.parametrize("kind", ["500", "503", "reset", "lost reply"])
def test_a_request_that_fails_once(scene: Scene, kind: str) -> None:
    count = scene.requests_of(lambda: scene.save(2.0, scene.faulty))
    assert count >= 6, "two files of tensors, their digests and the manifest, written and the old ones deleted"
    for number in range(1, count + 1):
        scene.begin()
        scene.proxy.plan(HttpFault(kind, number))
        scene.save(2.0, scene.faulty)
        assert len(scene.proxy.requests) > count, f"request {number} was not noticed"
        assert scene.value() == 2.0
    count = scene.requests_of(lambda: scene.value_at(scene.faulty))
    for number in range(1, count + 1):
        scene.proxy.plan(HttpFault(kind, number))
        assert scene.value_at(scene.faulty) == 1.0


@pytest.mark.parametrize("kind", ["503", "reset"])
def test_a_store_that_goes_away(scene: Scene, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    count = scene.requests_of(lambda: scene.save(2.0, scene.faulty))
    outcomes = set()
    for number in range(1, count + 1):
        scene.begin()
        scene.proxy.plan(HttpFault(kind, number, for_good=True))
        failure: CheckpointError | None = None
        try:
            scene.save(2.0, scene.faulty)
        except CheckpointError as error:
            failure = error
        if failure is not None:
            assert scene.path in str(failure)
        else:
            # It is committed, and what was there before stays next to it.
            assert scene.value() == 2.0
            assert f"could not delete what was at {scene.path} before" in caplog.text
        outcomes.add(scene.value())
        caplog.clear()
        scene.save(3.0, scene.faulty)
        assert scene.value() == 3.0
    assert outcomes == {1.0, 2.0}, "before the manifest, and after it"
    count = scene.requests_of(lambda: scene.value_at(scene.faulty))
    for number in range(1, count + 1):
        scene.proxy.plan(HttpFault(kind, number, for_good=True))
        with pytest.raises(CheckpointError):
            scene.value_at(scene.faulty)
