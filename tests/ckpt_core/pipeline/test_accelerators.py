"""States on accelerators: staged on a separate stream, saved as they were, and loaded with the same bits.

Each test runs on the simulated device, whose streams run only when they are waited for, and on CUDA.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from ckpt_core import CheckpointCorruptedError, Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core._devices.generators import DeviceGenerators
from ckpt_core._devices.pinning import pin
from ckpt_core._devices.streams import LateCopy, on_current_streams
from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core._pipeline import device_copy
from ckpt_core._pipeline.buffer_pool import BufferPool
from ckpt_core._pipeline.device_copy import BackgroundCopy
from ckpt_core.buffers import StagingBuffer
from ckpt_core.recorder.fingerprints import digest_generators
from ckpt_core.state.rng import RngState
from ckpt_core.storage import LocalStorage
from tests.conftest import ScriptRunner
from tests.support.accelerators import SIMULATED, Accelerator, SimulatedAccelerator
from tests.support.reserving import wait_until_reserved
from tests.support.states import DTYPES, assert_same_state, tensor_of

MIB = 2**20
both_layouts = pytest.mark.parametrize("layout", ["file", "directory"])
both_strategies = pytest.mark.parametrize("strategy", ["sync", "async"])
simulated_only = pytest.mark.parametrize("accelerator", [SIMULATED], indirect=True)


def save(layout: str, strategy: Any, state: dict[str, torch.Tensor], path: Path, after: Any = lambda: None) -> Any:
    """Save and load again; call ``after`` when ``save`` has returned."""
    if layout == "file":
        with Checkpointer(strategy=strategy) as checkpointer:
            checkpointer.save(state, path)
            after()
            checkpointer.wait()
            return checkpointer.load(path, map_location="cpu")
    with DirectoryCheckpointer(strategy=strategy) as directories:
        directories.save([Part("model", state, Kind.REPLICATED)], path)
        after()
        directories.wait()
        with directories.load(path) as opened:
            return opened.load("model")


def values(tensor: torch.Tensor) -> list[float]:
    return tensor.cpu().unique().tolist()


@pytest.mark.each_value
@both_strategies
@both_layouts
def test_every_dtype_and_shape_comes_back(tmp_path: Path, layout: str, strategy: str, accelerator: Accelerator) -> None:
    expected = {str(dtype): tensor_of(dtype, 3, 5) for dtype in DTYPES}
    expected["large"] = tensor_of(torch.uint8, 20 * MIB)
    expected["scalar"], expected["empty"] = tensor_of(torch.float32), tensor_of(torch.float32, 0, 4)
    expected["columns"] = tensor_of(torch.float32, 300, 200).t().contiguous()
    state = {name: tensor.to(accelerator.type) for name, tensor in expected.items()}
    state["columns"] = expected["columns"].t().contiguous().to(accelerator.type).t()
    state["host"] = expected["host"] = tensor_of(torch.float32, 7)
    found = save(layout, strategy, state, tmp_path / "saved")
    assert_same_state({name: tensor.contiguous() for name, tensor in found.items()}, expected)


@pytest.mark.each_value
@both_strategies
@both_layouts
def test_what_is_queued_before_is_saved_and_what_is_queued_after_is_not(
    tmp_path: Path, layout: str, strategy: str, accelerator: Accelerator
) -> None:
    weight = torch.zeros(2 * MIB, device=accelerator.type)
    accelerator.module.synchronize()
    accelerator.busy()
    weight.fill_(1.0)
    found = save(layout, strategy, {"weight": weight}, tmp_path / "saved", after=lambda: weight.fill_(2.0))
    assert values(found["weight"]) == [1.0]
    assert values(weight) == [2.0]


@pytest.mark.each_value
@both_strategies
@both_layouts
def test_a_state_that_another_stream_computes_is_waited_for(
    tmp_path: Path, layout: str, strategy: str, accelerator: Accelerator
) -> None:
    weight = torch.zeros(2 * MIB, device=accelerator.type)
    accelerator.module.synchronize()
    with torch.Stream(device=accelerator.type):
        accelerator.busy()
        weight.fill_(1.0)
        found = save(layout, strategy, {"weight": weight}, tmp_path / "saved")
    assert values(found["weight"]) == [1.0]


@pytest.mark.each_value
@both_strategies
@both_layouts
def test_states_of_several_devices_are_waited_for(
    tmp_path: Path, layout: str, strategy: str, accelerator: Accelerator
) -> None:
    if accelerator.module.device_count() < 2:
        pytest.skip("one device")
    weights = {f"w{index}": torch.zeros(MIB, device=f"{accelerator.type}:{index}") for index in range(2)}
    for index, weight in enumerate(weights.values()):
        accelerator.busy(index)
        weight.fill_(index + 1.0)
    found = save(
        layout, strategy, weights, tmp_path / "saved", after=lambda: [weight.zero_() for weight in weights.values()]
    )
    assert [values(found[name]) for name in weights] == [[1.0], [2.0]]
    assert accelerator.module.current_device() == 0


@pytest.mark.each_value
@both_strategies
@both_layouts
def test_views_that_are_only_marked_as_conjugate_or_negative_are_saved_by_value(
    tmp_path: Path, layout: str, strategy: str, accelerator: Accelerator
) -> None:
    host = torch.randn(70_000, dtype=torch.complex64)
    expected = {"conj": host.conj().resolve_conj(), "neg": host.conj().imag.resolve_neg()}
    one, two = (torch.zeros(70_000, dtype=torch.complex64, device=accelerator.type) for _ in range(2))
    accelerator.busy()
    for device in (one, two):
        device.copy_(host, non_blocking=True)
    found = save(layout, strategy, {"conj": one.conj(), "neg": two.conj().imag}, tmp_path / "saved")
    assert_same_state({"conj": found["conj"].resolve_conj(), "neg": found["neg"].resolve_neg()}, expected)


@pytest.mark.sampled(2)
@both_layouts
def test_every_step_is_saved_as_it_was(tmp_path: Path, layout: str, accelerator: Accelerator) -> None:
    model = torch.nn.Linear(256, 256, device=accelerator.type)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    expected = []
    checkpointers: Any = {"file": Checkpointer, "directory": DirectoryCheckpointer}
    with checkpointers[layout](strategy="async", max_pending=2) as checkpointer:
        for step in range(5):
            model(torch.full((8, 256), 1.0 / (step + 1), device=accelerator.type)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = model.state_dict()
            expected.append({name: value.cpu() for name, value in state.items()})
            if layout == "file":
                checkpointer.save(state, tmp_path / str(step))
            else:
                checkpointer.save([Part("model", state, Kind.REPLICATED)], tmp_path / str(step))
        checkpointer.wait()
        for step, wanted in enumerate(expected):
            if layout == "file":
                found = checkpointer.load(tmp_path / str(step), map_location="cpu")
            else:
                with checkpointer.load(tmp_path / str(step)) as opened:
                    found = opened.load("model")
            assert_same_state(dict(found), wanted)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_the_staging_buffer_is_pinned_and_the_memory_of_other_threads_is_not(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    with Checkpointer(strategy="async") as checkpointer:
        checkpointer.save({"weight": torch.ones(10_000, device=accelerator.type)}, tmp_path / "a.ckpt")
        checkpointer.wait()
        (buffer,) = checkpointer._pipeline.buffers._idle
        assert buffer.tensor.is_pinned()
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"weight": torch.ones(10_000, device=accelerator.type)}, tmp_path / "b.ckpt")
        assert {buffer.tensor.is_pinned() for buffer, _ in checkpointer._pipeline.scratch._idle} == {False}


def test_memory_that_cannot_be_pinned_is_used_as_it_is(accelerator: Accelerator) -> None:
    buffer = StagingBuffer(MIB, pinned=True)
    assert pin(buffer.tensor) is None  # it is already pinned
    assert torch.ones(4, device=accelerator.type).sum().item() == 4  # the next kernel does not meet the error
    buffer.close()


@simulated_only
@both_layouts
def test_a_save_does_not_need_pinned_memory(tmp_path: Path, layout: str, accelerator: SimulatedAccelerator) -> None:
    weight = torch.ones(MIB, device=accelerator.type)
    with accelerator.module.limited_pinning(0):
        found = save(layout, "async", {"weight": weight}, tmp_path / "saved", after=lambda: weight.fill_(2.0))
    assert values(found["weight"]) == [1.0]


@simulated_only
def test_memory_that_nobody_closes_is_unpinned_before_the_system_takes_it(accelerator: SimulatedAccelerator) -> None:
    buffer = StagingBuffer(MIB, pinned=True)
    address = buffer.tensor.data_ptr()
    del buffer
    gc.collect()
    assert accelerator.module.host_register(address, MIB) == 0  # as a buffer that is allocated there later would be
    assert accelerator.module.host_unregister(address) == 0


@simulated_only
def test_a_forked_child_leaves_the_device_alone_when_it_frees_the_memory(accelerator: SimulatedAccelerator) -> None:
    buffer = StagingBuffer(MIB, pinned=True)
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            buffer.close()
            failed = int(StagingBuffer(4096, pinned=True).tensor.sum().item())
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert accelerator.module.host_unregister(buffer.tensor.data_ptr()) == 0
    assert accelerator.module.host_register(buffer.tensor.data_ptr(), buffer.nbytes) == 0
    buffer.close()


def test_a_buffer_that_comes_back_to_a_closed_pool_is_freed(accelerator: Accelerator) -> None:
    pool = BufferPool(1)
    buffer = pool.acquire(MIB)
    assert buffer.tensor.is_pinned()
    pool.close()
    assert buffer.tensor.is_pinned()  # its holder may still use it
    pool.release(buffer)
    assert buffer.tensor.numel() == 0
    again = pool.acquire(MIB)
    assert again is not buffer
    pool.release(again)
    assert pool._idle == [again]
    pool.close()


@simulated_only
def test_a_copy_that_fails_half_way_writes_nothing_afterwards(
    accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "COPY_GROUP", MIB)
    sources = [torch.full((MIB,), 7, dtype=torch.uint8, device=accelerator.type) for _ in range(2)]
    needs_a_temporary = torch.full((1024, 1024), 7, dtype=torch.uint8, device=accelerator.type).t()
    buffer = StagingBuffer(3 * MIB, pinned=True)
    targets = list(buffer.tensor.view(3, MIB))
    targets[1] = targets[1].view(1024, 1024)
    pieces = zip(targets, [sources[0], needs_a_temporary, sources[1]], strict=True)
    with accelerator.module.limited_memory(0):
        with pytest.raises(torch.OutOfMemoryError):
            BackgroundCopy([((number + 1) * MIB, *piece) for number, piece in enumerate(pieces)])
        assert accelerator.module.in_flight() == 0
    buffer.close()


@simulated_only
def test_a_copy_that_is_given_up_before_it_is_handed_over_is_over(accelerator: SimulatedAccelerator) -> None:
    source = torch.full((MIB,), 7, dtype=torch.uint8, device=accelerator.type)
    buffer = StagingBuffer(MIB, pinned=True)
    copy = BackgroundCopy([(MIB, buffer.tensor[:MIB], source)])
    assert accelerator.module.in_flight() == 1
    copy.abandon()
    assert accelerator.module.in_flight() == 0
    copy.settle()
    with pytest.raises(ImageAbandonedError):
        copy.wait_until(MIB)
    with pytest.raises(ImageAbandonedError):
        copy.wait()
    buffer.close()


@simulated_only
def test_a_save_for_which_the_device_has_no_memory_fails_and_the_next_one_does_not(
    tmp_path: Path, accelerator: SimulatedAccelerator
) -> None:
    state = {"a": torch.ones(MIB, device=accelerator.type), "b": torch.ones(1024, 1024, device=accelerator.type).t()}
    parts = [Part("model", state, Kind.REPLICATED)]
    with DirectoryCheckpointer(strategy="async") as checkpointer:
        with accelerator.module.limited_memory(0), pytest.raises(torch.OutOfMemoryError):
            checkpointer.save(parts, tmp_path / "one")
        assert accelerator.module.in_flight() == 0
        assert not checkpointer.exists(tmp_path / "one")
        checkpointer.save(parts, tmp_path / "two")
        with checkpointer.load(tmp_path / "two") as opened:
            found = opened.load("model")
        assert_same_state(found, {name: tensor.cpu() for name, tensor in state.items()})


class _Gate(LocalStorage):
    """A disk that creates a file only once ``may_begin`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_begin = threading.Event()

    def create(self, *args: Any, **kwargs: Any) -> Any:
        self.may_begin.wait()
        return super().create(*args, **kwargs)


@simulated_only
@pytest.mark.parametrize(
    ("layout", "kind"), [("file", None), ("directory", Kind.REPLICATED), ("directory", Kind.PER_RANK)]
)
def test_device_memory_is_not_held_while_the_checkpoint_is_written(
    tmp_path: Path, layout: str, kind: Any, accelerator: SimulatedAccelerator
) -> None:
    gc.collect()
    before = accelerator.module.live_bytes()
    storage = _Gate()
    checkpointers: Any = {"file": Checkpointer, "directory": DirectoryCheckpointer}
    with checkpointers[layout](strategy="async", storage=storage) as checkpointer:
        state = {
            "gathered": torch.ones(MIB, device=accelerator.type),
            "turned": torch.ones(8, 9).to(accelerator.type).t(),
        }
        try:
            checkpointer.save(state if layout == "file" else [Part("model", state, kind)], tmp_path / "saved")
            del state
            gc.collect()
            deadline = time.monotonic() + 60  # the device's thread frees what it has gathered a moment later
            while accelerator.module.live_bytes() > before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert accelerator.module.live_bytes() == before
        finally:
            storage.may_begin.set()
        checkpointer.wait()
        if layout == "file":
            found = checkpointer.load(tmp_path / "saved", map_location="cpu")
        else:
            with checkpointer.load(tmp_path / "saved") as opened:
                found = opened.load("model")
    assert [values(found["gathered"]), values(found["turned"])] == [[1.0], [1.0]]


@simulated_only
def test_all_saves_use_one_stream_of_a_device(tmp_path: Path, accelerator: SimulatedAccelerator) -> None:
    state = {f"w{index}": torch.ones(1000, device=f"{accelerator.type}:{index}") for index in range(2)}
    save("file", "async", state, tmp_path / "first")
    before = [accelerator.module.stream_count(index) for index in range(2)]
    for layout in ("file", "directory"):
        save(layout, "async", state, tmp_path / layout)
    assert [accelerator.module.stream_count(index) for index in range(2)] == before


@simulated_only
@both_layouts
def test_a_device_without_streams_is_waited_for(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core._devices.streams._side_streams", {})
    weight = torch.zeros(MIB, device=accelerator.type)
    accelerator.module.synchronize()
    with accelerator.module.without_streams():
        weight.fill_(1.0)
        found = save(layout, "async", {"weight": weight}, tmp_path / "saved", after=lambda: weight.fill_(2.0))
    assert values(found["weight"]) == [1.0]


@simulated_only
def test_writing_begins_while_the_rest_is_still_being_copied(
    accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "COPY_GROUP", MIB)
    buffer = StagingBuffer(2 * MIB, pinned=True)
    late = torch.Stream(device="simulated:1")
    sources = [torch.ones(MIB, dtype=torch.uint8, device=f"simulated:{index}") for index in range(2)]
    accelerator.module.pause(late)
    with late:
        sources[1].fill_(2)
        copy = BackgroundCopy(
            [((index + 1) * MIB, target, sources[index]) for index, target in enumerate(buffer.tensor.view(2, MIB))]
        )
    training = threading.Thread(target=copy.hand_over)
    training.start()
    try:
        copy.wait_until(MIB)  # would never return if it waited for everything
        assert values(buffer.tensor[:MIB]) == [1]
    finally:
        accelerator.module.resume(late)
    training.join()
    assert copy.wait()
    assert values(buffer.tensor[MIB:]) == [2]
    buffer.close()


@simulated_only
def test_reserved_memory_is_pinned_for_the_device_in_use(accelerator: SimulatedAccelerator) -> None:
    torch.zeros(1, device="simulated:1")
    accelerator.module.set_device(1)
    try:
        pool = BufferPool(1)
        pool.reserve(10_000)
        wait_until_reserved()
        buffer = pool.acquire(10_000)
        assert buffer.tensor.is_pinned()
        pool.release(buffer)
        pool.close()
    finally:
        accelerator.module.set_device(0)


# ---- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [None, "cpu", "device", "index", "dict"])
def test_a_file_loads_where_it_is_told(tmp_path: Path, where: str | None, accelerator: Accelerator) -> None:
    first = f"{accelerator.type}:0"
    map_location = {"device": accelerator.type, "index": torch.device(first), "dict": {first: "cpu"}}.get(
        str(where), where
    )
    path = tmp_path / "saved.ckpt"
    state = {"weight": torch.arange(6.0, device=first), "host": torch.arange(3)}
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(state, path)
        found = checkpointer.load(path, map_location=map_location)
    stock = torch.load(path, map_location=map_location, weights_only=True)
    assert {name: tensor.device for name, tensor in found.items()} == {name: t.device for name, t in stock.items()}
    assert [found["weight"].tolist(), found["host"].tolist()] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0, 1, 2]]


def test_a_directory_loads_into_tensors_of_the_device(tmp_path: Path, accelerator: Accelerator) -> None:
    state = {
        "weight": torch.randn(300, 70, device=accelerator.type),
        "bias": torch.randn(3, device=accelerator.type),
        "columns": torch.randn(90, 80, device=accelerator.type).t(),
    }
    with DirectoryCheckpointer(strategy="async") as checkpointer:
        checkpointer.save([Part("model", state, Kind.REPLICATED)], tmp_path / "saved")
        with checkpointer.load(tmp_path / "saved") as opened:
            into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            opened.load("model", into=into)
            new = opened.load("model", map_location=accelerator.type)
    for found in (into, new):
        assert {tensor.device.type for tensor in found.values()} == {accelerator.type}
        assert_same_state(*({name: t.cpu().contiguous() for name, t in tensors.items()} for tensors in (found, state)))


@pytest.mark.parametrize("size", [1000, 5 * MIB])
def test_what_is_queued_before_a_load_does_not_overwrite_what_is_loaded(
    tmp_path: Path, size: int, accelerator: Accelerator
) -> None:
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save([Part("model", {"weight": torch.ones(size)}, Kind.REPLICATED)], tmp_path / "saved")
        weight = torch.empty(size, device=accelerator.type)
        accelerator.module.synchronize()
        with torch.Stream(device=accelerator.type), checkpointer.load(tmp_path / "saved") as opened:
            accelerator.busy()
            weight.zero_()
            opened.load("model", into={"weight": weight})
            weight.mul_(2.0)  # this runs in the order of the caller's stream, too
            assert values(weight) == [2.0]


@both_layouts
def test_memory_that_queued_work_still_uses_is_not_loaded_into_too_early(
    tmp_path: Path, layout: str, accelerator: Accelerator
) -> None:
    state = {"weight": torch.ones(MIB)}
    save(layout, "sync", state, tmp_path / "saved")
    with torch.Stream(device=accelerator.type):
        old = torch.empty(MIB, device=accelerator.type)
        accelerator.busy()
        old.fill_(3.0)
        del old  # the next tensor on this stream reuses its memory
        if layout == "file":
            with Checkpointer(strategy="sync") as checkpointer:
                found = checkpointer.load(tmp_path / "saved", map_location=accelerator.type)
        else:
            with DirectoryCheckpointer(strategy="sync") as directories, directories.load(tmp_path / "saved") as opened:
                found = opened.load("model", map_location=accelerator.type)
        assert values(found["weight"]) == [1.0]


def make_pinned_loads_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads of a few MiB pass through pinned memory, of which there are two buffers."""
    monkeypatch.setattr("ckpt_core.buffers._WORTH_PINNING", 1)
    monkeypatch.setattr("ckpt_core.buffers._MOST_PINNED", 2)


def saved_many(layout: str, path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = {f"w{n}": torch.randn(MIB + 7 * n, generator=generator) for n in range(12)}
    state["columns"] = torch.randn(900, 800, generator=generator).t()
    save(layout, "sync", state, path)
    return state


def load(layout: str, path: Path, device: str) -> dict[str, torch.Tensor]:
    if layout == "file":
        with Checkpointer() as checkpointer:
            return dict(checkpointer.load(path, map_location=device))
    with DirectoryCheckpointer() as directories, directories.load(path) as opened:
        return dict(opened.load("model", map_location=device))


def on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


@both_layouts
def test_a_load_passes_through_pinned_memory_in_the_order_of_the_caller(
    tmp_path: Path, layout: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pinned_loads_small(monkeypatch)
    expected = saved_many(layout, tmp_path / "saved")
    with torch.Stream(device=accelerator.type):
        old = [torch.empty_like(tensor, device=accelerator.type) for tensor in expected.values()]
        accelerator.busy()
        for tensor in old:
            tensor.fill_(3.0)
        del old, tensor  # the loaded tensors reuse their memory
        found = load(layout, tmp_path / "saved", accelerator.type)
        assert_same_state(on_host(found), on_host(expected))


@simulated_only
@both_layouts
def test_pinned_memory_is_not_read_into_while_it_is_being_copied_from(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pinned_loads_small(monkeypatch)
    expected = saved_many(layout, tmp_path / "saved")
    stream = torch.Stream(device=accelerator.type)
    found: dict[str, torch.Tensor] = {}

    def load_on_stream() -> None:
        with stream:
            found.update(load(layout, tmp_path / "saved", accelerator.type))

    accelerator.module.pause(stream)
    loading = threading.Thread(target=load_on_stream)
    loading.start()
    while accelerator.module.in_flight() < 2:  # the host continues as far as there is memory
        time.sleep(0.001)
    accelerator.module.resume(stream)
    loading.join()
    assert_same_state(on_host(found), on_host(expected))


@simulated_only
@both_layouts
def test_a_load_that_fails_half_way_leaves_no_copy_from_memory_that_is_gone(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pinned_loads_small(monkeypatch)
    saved_many(layout, tmp_path / "saved")
    file = tmp_path / "saved" if layout == "file" else tmp_path / "saved" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(40 * MIB)
        opened.write(b"damaged")
    with pytest.raises(CheckpointCorruptedError):
        load(layout, tmp_path / "saved", accelerator.type)
    assert accelerator.module.in_flight() == 0


@simulated_only
@both_layouts
def test_a_load_does_not_need_pinned_memory(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pinned_loads_small(monkeypatch)
    expected = saved_many(layout, tmp_path / "saved")
    with accelerator.module.limited_pinning(0):
        assert_same_state(on_host(load(layout, tmp_path / "saved", accelerator.type)), on_host(expected))


# ---- generators ------------------------------------------------------------------------------------------------------


def draws(accelerator: Accelerator) -> list[Any]:
    devices = [f"{accelerator.type}:{index}" for index in range(accelerator.module.device_count())]
    on_devices = [torch.rand(3, device=device).tolist() for device in devices]
    return [random.random(), np.random.random(), torch.rand(2).tolist(), on_devices]


def test_generators_of_every_device_go_on(tmp_path: Path, accelerator: Accelerator) -> None:
    draws(accelerator)
    path = tmp_path / "rng.ckpt"
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(RngState.capture().encode(), path)
        expected = [draws(accelerator), draws(accelerator)]
        # as frameworks do that load everything to the device
        loaded = checkpointer.load(path, map_location=accelerator.type)
    RngState.decode(loaded).restore()
    assert [draws(accelerator), draws(accelerator)] == expected


def test_the_device_in_use_goes_on_with_the_generator_of_the_one_that_was(accelerator: Accelerator) -> None:
    accelerator.module.manual_seed(5)
    state = RngState.capture()
    expected = torch.rand(3, device=accelerator.type).tolist()
    accelerator.module.manual_seed(6)
    mine, other = (s.devices[accelerator.type].states[0] for s in (state, RngState.capture()))
    # as saved by the second process of a machine, which has one device to itself now
    moved = RngState(state.python, state.numpy, state.torch_cpu, {accelerator.type: DeviceGenerators((other, mine), 1)})
    RngState.decode(moved.encode()).restore()
    assert torch.rand(3, device=accelerator.type).tolist() == expected


def test_the_recorder_sees_the_generator_of_the_device(accelerator: Accelerator) -> None:
    before = digest_generators()
    assert digest_generators(RngState.capture()) == before
    torch.rand(3, device=accelerator.type)
    after = digest_generators()
    assert after != before
    assert digest_generators(RngState.decode(RngState.capture().encode())) == after


def test_a_late_number_waits_for_the_device_that_computes_it(accelerator: Accelerator) -> None:
    last = accelerator.module.device_count() - 1
    value = torch.zeros(1, dtype=torch.float64, device=f"{accelerator.type}:{last}")
    accelerator.busy(last)
    value.fill_(7.0)
    assert LateCopy(value).take() == 7.0


@pytest.mark.gpu
def test_generators_of_earlier_versions_are_read() -> None:
    torch.cuda.manual_seed(5)
    encoded = RngState.capture().encode()
    assert encoded["cuda_device"] == 0
    assert [state.device.type for state in encoded["cuda"]] == ["cpu"] * torch.cuda.device_count()
    expected = torch.rand(3, device="cuda").tolist()
    RngState.decode(encoded).restore()
    assert torch.rand(3, device="cuda").tolist() == expected


def test_cuda_keeps_the_names_that_it_had() -> None:
    state = RngState.capture()
    generators = DeviceGenerators((torch.get_rng_state(), torch.get_rng_state()), 1)
    encoded = RngState(state.python, state.numpy, state.torch_cpu, {"cuda": generators}).encode()
    assert [torch.equal(found, torch.get_rng_state()) for found in encoded["cuda"]] == [True, True]
    assert encoded["cuda_device"] == 1
    assert "devices" not in encoded
    assert RngState.decode(encoded).devices["cuda"].current == 1
    del encoded["cuda_device"]  # as in checkpoints from before it was saved
    assert RngState.decode(encoded).devices["cuda"].current == 0


# ---- programs without an accelerator ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_program_that_does_not_use_cuda_goes_on_without_it(run_script: ScriptRunner) -> None:
    run_script(
        """
        import torch
        from ckpt_core import Checkpointer, CheckpointCorruptedError, DirectoryCheckpointer, Kind, Part
        from ckpt_core.state.rng import RngState

        state = {"weight": torch.ones(1000)}
        for strategy in ("sync", "async"):
            with Checkpointer(strategy=strategy) as checkpointer:
                checkpointer.save({**state, "rng": RngState.capture().encode()}, "a.ckpt")
                RngState.decode(checkpointer.load("a.ckpt")["rng"]).restore()
            with DirectoryCheckpointer(strategy=strategy) as checkpointer:
                checkpointer.save([Part("model", state, Kind.REPLICATED)], "b")
        assert torch.cuda.is_available() and not torch.cuda.is_initialized()
        """
    )


@both_strategies
@both_layouts
def test_nothing_is_asked_of_devices_for_tensors_of_the_host(
    tmp_path: Path, layout: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("this starts the device where there is one")

    refused: Callable[..., NoReturn] = refuse
    for module in (torch.cuda, torch.accelerator):
        for name in ("current_stream", "current_device", "current_device_index", "set_device_index", "synchronize"):
            monkeypatch.setattr(module, name, refused, raising=False)
    monkeypatch.setattr(torch, "Stream", refused)
    found = save(layout, strategy, {"weight": torch.ones(300_000)}, tmp_path / "saved")
    assert found["weight"].sum().item() == 300_000


def test_two_threads_may_use_one_stream_at_the_same_time(accelerator: Accelerator) -> None:
    device = torch.device(accelerator.type, 0)
    caller = torch.Stream(device)
    with caller:
        work = on_current_streams(lambda job: job(), [torch.empty(4, device=device)])
    inside, left = threading.Barrier(2, timeout=200), threading.Barrier(2, timeout=200)
    seen: dict[str, list[Any]] = {"first": [], "last": []}

    def enter_and_leave(name: str) -> None:
        own = torch.Stream(device)
        torch.accelerator.set_stream(own)

        def job() -> None:
            inside.wait()
            seen[name].append(torch.accelerator.current_stream(device) == caller)
            if name == "last":
                left.wait()
                seen[name].append(torch.accelerator.current_stream(device) == caller)

        work(job)
        seen[name].append(torch.accelerator.current_stream(device) == own)
        if name == "first":
            left.wait()

    threads = [threading.Thread(target=enter_and_leave, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert seen == {"first": [True, True], "last": [True, True, True]}
