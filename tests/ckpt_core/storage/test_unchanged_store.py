"""Unchanged files on object stores: copied by the server, and no checkpoint depends on another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_core import DirectoryCheckpointer
from ckpt_core.storage import Storage
from tests.support.fine_tuning import FineTune, bytes_written, copies, counted, load_model
from tests.support.servers import Server
from tests.support.states import assert_same_state
from tests.support.stores import storage_at

SAVES = 5


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("moto obstore")
@pytest.mark.parametrize("place", ["moto", "moto obstore", "azurite"])
def test_a_fine_tune_uploads_what_is_trained(place: str, server_of: Callable[[str], Server]) -> None:
    kind, _, backend = place.partition(" ")
    if backend:
        pytest.importorskip("obstore")
    server = server_of(kind)
    options: dict[str, Any] = {**server.options, **({"backend": backend} if backend else {})}
    root = f"{server.new_bucket()}/run"
    inner: Storage = storage_at((root, options))
    storage = counted(inner)
    run = FineTune.new(width=400)
    models, written = {}, []
    with DirectoryCheckpointer(storage=storage, slice_replicated=True) as checkpointer:
        for number in range(SAVES):
            run.step()
            before = bytes_written(storage)
            checkpointer.save(run.parts(), f"{root}/{number}")
            checkpointer.wait()
            written.append(bytes_written(storage) - before)
            models[f"{root}/{number}"] = {key: value.clone() for key, value in run.model().items()}
    assert copies(storage) == SAVES - 1
    assert written[0] > sum(tensor.nbytes for tensor in run.frozen.values())
    assert all(count < 1.05 * run.trained_bytes + 10 * 4096 for count in written[1:])
    for gone in (1, 3):
        with DirectoryCheckpointer(storage=inner) as checkpointer:
            checkpointer.remove(f"{root}/{gone}")
        del models[f"{root}/{gone}"]
    for path, model in models.items():
        assert_same_state(load_model(path, inner), model)
    with DirectoryCheckpointer(storage=storage, slice_replicated=True) as checkpointer:
        checkpointer.load(f"{root}/4").close()
        run.step()
        checkpointer.save(run.parts(), f"{root}/next")
    assert copies(storage) == SAVES, "a resumed run copies what it loaded"
    assert_same_state(load_model(f"{root}/next", inner), run.model())
