"""The simulated device does what other tests rely on."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.accelerators import SIMULATED, SimulatedAccelerator

pytestmark = pytest.mark.parametrize("accelerator", [SIMULATED], indirect=True)
DEVICE = "simulated:0"


@pytest.fixture
def device(accelerator: SimulatedAccelerator) -> Any:
    return accelerator.module


@pytest.fixture
def side(accelerator: SimulatedAccelerator) -> Iterator[torch.Stream]:
    stream = torch.Stream(device=DEVICE)
    yield stream
    accelerator.module.resume(stream)


def in_child(act: Callable[[], object]) -> int:
    """Return the exit status of a forked child that calls ``act``: 0 if that returns, 1 if it raises."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # an expected crash should not be printed
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_streams_do_what_somebody_waits_for_and_no_more(device: Any, side: torch.Stream) -> None:
    value = torch.zeros(3, device=DEVICE)
    value.fill_(1.0)
    event = torch.accelerator.current_stream().record_event()
    value.fill_(2.0)
    with side:
        side.wait_event(event)
        assert value.cpu().tolist() == [1.0, 1.0, 1.0]
    assert value.cpu().tolist() == [2.0, 2.0, 2.0]


def test_a_stream_that_is_paused_holds_up_who_waits_for_it_and_nobody_else(device: Any, side: torch.Stream) -> None:
    value, other = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    torch.accelerator.synchronize()
    device.pause(side)
    with side:
        value.fill_(1.0)
    other.fill_(2.0)
    assert [value.cpu().tolist(), other.cpu().tolist()] == [[0.0] * 3, [2.0] * 3]
    assert not side.query()
    device.resume(side)
    side.synchronize()
    assert side.query()
    assert value.cpu().tolist() == [1.0] * 3


def test_side_streams_alone_can_be_late(device: Any, side: torch.Stream) -> None:
    value = torch.zeros(3, device=DEVICE)
    torch.accelerator.synchronize()
    with device.lazy(side_streams_only=True):
        with side:
            value.fill_(1.0)
        value.add_(5.0)
        assert value.cpu().tolist() == [5.0] * 3
        side.synchronize()
        assert value.cpu().tolist() == [1.0] * 3


def test_copies_are_queued_if_and_only_if_host_memory_is_pinned(device: Any) -> None:
    source = torch.full((4,), 7.0, device=DEVICE)
    for pinned in (True, False):
        target = torch.zeros(4, pin_memory=pinned)
        target.copy_(source, non_blocking=True)
        assert device.in_flight() == int(pinned)
        assert target.tolist() == [0.0 if pinned else 7.0] * 4
        torch.accelerator.synchronize()
        assert target.tolist() == [7.0] * 4


def test_host_memory_that_is_unpinned_too_early_is_a_violation(device: Any) -> None:
    target = torch.zeros(1024)
    assert device.host_register(target.data_ptr(), target.nbytes) == 0
    assert device.host_register(target.data_ptr(), target.nbytes) == 712
    with device.limited_pinning(0):
        assert device.host_register(torch.zeros(9).data_ptr(), 36) == 2
    target.copy_(torch.ones(1024, device=DEVICE), non_blocking=True)
    assert device.host_unregister(target.data_ptr()) == 0
    assert device.host_unregister(target.data_ptr()) == 713
    torch.accelerator.synchronize()  # before the memory is freed
    assert device.take_violations() == ["host memory was unregistered while a stream uses it"]
    assert device.take_violations() == []


def test_the_host_cannot_touch_device_memory(device: Any) -> None:
    address = torch.ones(4, device=DEVICE).data_ptr()
    assert in_child(lambda: ctypes.string_at(address, 4)) == -signal.SIGSEGV


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_overwritten_when_its_stream_gets_there(
    device: Any, side: torch.Stream, recorded: bool
) -> None:
    value = torch.ones(128, device=DEVICE)
    copied = torch.zeros(128, pin_memory=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        copied.copy_(value, non_blocking=True)
    live = device.live_bytes()
    if recorded:
        value.record_stream(side)
    del value
    assert live - device.live_bytes() == 512
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    assert copied.view(torch.uint8).unique().tolist() == ([0, 63, 128] if recorded else [0xDB])


def test_memory_can_run_out(device: Any) -> None:
    with device.limited_memory(1024), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1025, dtype=torch.uint8, device=DEVICE)
    assert torch.empty(1025, dtype=torch.uint8, device=DEVICE).numel() == 1025


def test_forked_children_are_refused(device: Any) -> None:
    assert in_child(lambda: torch.zeros(3).numel()) == 0
    assert in_child(lambda: torch.zeros(3, device=DEVICE)) == 1


def test_every_device_draws_from_its_own_generator(device: Any) -> None:
    torch.manual_seed(5)
    one, two = (torch.rand(3, device=f"simulated:{index}").tolist() for index in range(2))
    assert one == two
    before = torch.get_rng_state()
    assert torch.nn.functional.dropout(torch.ones(64, device=DEVICE), 0.5).sum().item() > 0
    assert torch.equal(torch.get_rng_state(), before)
    state = device.get_rng_state()
    drawn = torch.randn(3, device=DEVICE).tolist()
    device.set_rng_state(state)
    assert torch.randn(3, device=DEVICE).tolist() == drawn
    with pytest.raises(RuntimeError, match="of the host"):
        device.set_rng_state(state.to(DEVICE))


def test_what_is_queued_and_waited_for_is_counted(device: Any) -> None:
    value = torch.zeros(3, device=DEVICE)
    queued, waits = device.work_queued(), device.host_waits()
    value.add_(1.0).mul_(2.0)
    assert [device.work_queued() - queued, device.host_waits() - waits] == [2, 0]
    assert value.sum().item() == 6.0
    assert device.host_waits() - waits > 0


def test_training_has_the_values_of_the_cpu(device: Any) -> None:
    def trained(where: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )
        model = model.to(where)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.arange(32.0).reshape(8, 4).to(where)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [tensor.cpu() for tensor in model.state_dict().values()]

    for one, other in zip(trained("cpu"), trained(DEVICE), strict=True):
        assert torch.equal(one, other)
