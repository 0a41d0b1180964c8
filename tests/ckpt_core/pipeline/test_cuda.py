"""States on CUDA devices: staged on a stream of their own, saved as they were, and back with the same bits."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.state.rng import RngState
from tests.conftest import ScriptRunner
from tests.support.states import DTYPES, assert_same_state, tensor_of

DEVICE = "cuda"
BUSY_CYCLES = 500_000_000  # some tenths of a second
STRATEGIES = ("sync", "async")
LAYOUTS = ("file", "directory")


def save(layout: str, strategy: Any, state: dict[str, torch.Tensor], path: Path, after: Any = lambda: None) -> Any:
    """Save and load again; ``after`` is called when ``save`` has returned."""
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


def busy() -> None:
    """Let what is queued now begin late."""
    torch.cuda._sleep(BUSY_CYCLES)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_and_shape_comes_back(tmp_path: Path, layout: str, strategy: str) -> None:
    expected = {str(dtype): tensor_of(dtype, 3, 5) for dtype in DTYPES}
    expected["large"] = tensor_of(torch.uint8, 70 * 2**20)
    expected["scalar"], expected["empty"] = tensor_of(torch.float32), tensor_of(torch.float32, 0, 4)
    expected["columns"] = tensor_of(torch.float32, 300, 200).t().contiguous()
    state = {name: tensor.to(DEVICE) for name, tensor in expected.items()}
    state["columns"] = expected["columns"].t().contiguous().to(DEVICE).t()
    state["host"] = expected["host"] = tensor_of(torch.float32, 7)
    found = save(layout, strategy, state, tmp_path / "saved")
    assert_same_state({name: tensor.contiguous() for name, tensor in found.items()}, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_queued_before_is_saved_and_what_is_queued_after_is_not(
    tmp_path: Path, layout: str, strategy: str
) -> None:
    weight = torch.zeros(32 * 2**20, device=DEVICE)
    torch.cuda.synchronize()
    busy()
    weight.fill_(1.0)
    found = save(layout, strategy, {"weight": weight}, tmp_path / "saved", after=lambda: weight.fill_(2.0))
    assert found["weight"].unique().tolist() == [1.0]
    assert weight.unique().tolist() == [2.0]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_that_another_stream_computes_is_waited_for(tmp_path: Path, layout: str, strategy: str) -> None:
    weight = torch.zeros(32 * 2**20, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        weight.fill_(1.0)
        found = save(layout, strategy, {"weight": weight}, tmp_path / "saved")
    assert found["weight"].unique().tolist() == [1.0]


@pytest.mark.gpu
def test_states_of_several_devices_are_waited_for(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    weights = {f"w{index}": torch.zeros(32 * 2**20, device=f"cuda:{index}") for index in range(2)}
    for index, weight in enumerate(weights.values()):
        with torch.cuda.device(index):
            busy()
            weight.fill_(index + 1.0)
    found = save("file", "async", weights, tmp_path / "saved", after=lambda: [w.zero_() for w in weights.values()])
    assert [found[name].unique().tolist() for name in weights] == [[1.0], [2.0]]


@pytest.mark.gpu
def test_every_step_is_saved_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Linear(2048, 2048, device=DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    expected = []
    with Checkpointer(strategy="async", max_pending=2) as checkpointer:
        for step in range(6):
            model(torch.full((8, 2048), 1.0 / (step + 1), device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append({name: value.cpu() for name, value in model.state_dict().items()})
            checkpointer.save(model.state_dict(), tmp_path / f"{step}.ckpt")
        checkpointer.wait()
        for step, state in enumerate(expected):
            assert_same_state(dict(checkpointer.load(tmp_path / f"{step}.ckpt", map_location="cpu")), state)


@pytest.mark.gpu
def test_the_staging_buffer_is_pinned_and_the_memory_of_other_threads_is_not(tmp_path: Path) -> None:
    with Checkpointer(strategy="async") as checkpointer:
        checkpointer.save({"weight": torch.ones(10_000, device=DEVICE)}, tmp_path / "a.ckpt")
        checkpointer.wait()
        (buffer,) = checkpointer._pipeline.buffers._idle
        assert buffer.tensor.is_pinned()
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"weight": torch.ones(10_000, device=DEVICE)}, tmp_path / "b.ckpt")
        assert {buffer.tensor.is_pinned() for buffer in checkpointer._scratch._idle} == {False}


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_is_used_as_it_is(tmp_path: Path) -> None:
    from ckpt_core import memory

    torch.ones(1, device=DEVICE)
    buffer = memory.StagingBuffer(2**20, pinned=True)
    assert memory._pin(buffer.tensor) is False  # it is pinned already
    assert torch.ones(4, device=DEVICE).sum().item() == 4  # the error is not found by the next kernel
    buffer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("map_location", [None, "cpu", "cuda", torch.device("cuda", 0), {"cuda:0": "cpu"}])
def test_a_file_loads_where_it_is_told(tmp_path: Path, map_location: Any) -> None:
    path = tmp_path / "saved.ckpt"
    state = {"weight": torch.arange(6.0, device="cuda:0"), "host": torch.arange(3)}
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(state, path)
        found = checkpointer.load(path, map_location=map_location)
    stock = torch.load(path, map_location=map_location, weights_only=True)
    assert {name: tensor.device for name, tensor in found.items()} == {name: t.device for name, t in stock.items()}
    assert [found["weight"].tolist(), found["host"].tolist()] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0, 1, 2]]


@pytest.mark.gpu
def test_a_directory_loads_into_tensors_of_the_device(tmp_path: Path) -> None:
    state = {"weight": torch.randn(300, 70, device=DEVICE), "bias": torch.randn(3, device=DEVICE)}
    with DirectoryCheckpointer(strategy="async") as checkpointer:
        checkpointer.save([Part("model", state, Kind.REPLICATED)], tmp_path / "saved")
        with checkpointer.load(tmp_path / "saved") as opened:
            into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            opened.load("model", into=into)
            new = opened.load("model", map_location=DEVICE)
    assert_same_state(into, state)
    assert_same_state(new, state)


def draws() -> list[Any]:
    on_devices = [torch.rand(3, device=f"cuda:{index}").tolist() for index in range(torch.cuda.device_count())]
    return [random.random(), np.random.random(), torch.rand(2).tolist(), on_devices]


@pytest.mark.gpu
def test_generators_of_every_device_go_on(tmp_path: Path) -> None:
    draws()
    path = tmp_path / "rng.ckpt"
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(RngState.capture().encode(), path)
        expected = [draws(), draws()]
        loaded = checkpointer.load(path, map_location=DEVICE)  # as frameworks do, who load everything to the device
    RngState.decode(loaded).restore()
    assert [draws(), draws()] == expected


@pytest.mark.gpu
def test_the_device_in_use_goes_on_with_the_generator_of_the_one_that_was(tmp_path: Path) -> None:
    torch.cuda.manual_seed(5)
    state = RngState.capture()
    expected = torch.rand(3, device=DEVICE).tolist()
    torch.cuda.manual_seed(6)
    other = RngState.capture().torch_cuda[0]
    # as saved by the second process of a machine, which has one device to itself now
    moved = dataclasses.replace(state, torch_cuda=(other, state.torch_cuda[0]), cuda_device=1)
    RngState.decode(moved.encode()).restore()
    assert torch.rand(3, device=DEVICE).tolist() == expected


@pytest.mark.gpu
def test_a_program_that_does_not_use_cuda_goes_on_without_it(run_script: ScriptRunner) -> None:
    run_script(
        """
        import torch
        from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_asked_of_cuda_for_tensors_of_the_host(
    tmp_path: Path, layout: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("this starts CUDA where there is one")

    for name in ("stream", "Stream", "current_stream", "current_device", "set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    found = save(layout, strategy, {"weight": torch.ones(300_000)}, tmp_path / "saved")
    assert found["weight"].sum().item() == 300_000
