"""Saves that overlap with training: the host does not wait, the device waits as late as is right, and nothing is torn.

Each test runs on the simulated device. Pausing a stream shows what waits for it.
"""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_core import (
    Checkpointer,
    CheckpointError,
    DirectoryCheckpointer,
    Kind,
    Part,
    SnapshotTornError,
    StorageError,
    wait_staged,
)
from ckpt_core._devices import row_sums, streams
from ckpt_core._devices.row_sums import ROW, RowSums
from ckpt_core._pipeline import device_copy
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage
from tests.support.accelerators import SIMULATED, SimulatedAccelerator, hold_late_copies
from tests.support.hanging import returns
from tests.support.interrupting import at_every_moment
from tests.support.states import assert_same_state

MIB = 2**20
LONGEST_SECONDS = 200  # for calls that return at once
both_layouts = pytest.mark.parametrize("layout", ["file", "directory"])
pytestmark = pytest.mark.parametrize("accelerator", [SIMULATED], indirect=True)


class Training:
    """Trains a weight of 2 MiB and its momentum; a small weight, and a buffer of 4 MiB that no optimizer knows.

    Args:
        early: Whether some of the tensors are copied early.
    """

    def __init__(
        self, accelerator: SimulatedAccelerator, layout: str, directory: Path, *, early: bool = True, **settings: Any
    ) -> None:
        self.device, self.layout, self.directory, self.module = accelerator.type, layout, directory, accelerator.module
        checkpointers: Any = {"file": Checkpointer, "directory": DirectoryCheckpointer}
        self.checkpointer = checkpointers[layout](strategy="async", overlap=True, **settings)
        self.buffers = {"buffer": torch.zeros(MIB, device=self.device)} if early else {}
        # Not a whole number of words, whose rest is copied early; and not of whole rows.
        sizes = {"weight": MIB // 2 + 301, "small": 10} if early else {"weight": MIB // 2 + 300}
        self.weights = {name: torch.nn.Parameter(torch.ones(n, device=self.device)) for name, n in sizes.items()}
        self.optimizer = torch.optim.SGD(self.weights.values(), lr=1.0, momentum=0.5)
        self.step()  # from here on, the optimizer is known

    def step(self, closure: Any = None) -> None:
        for weight in self.weights.values():
            weight.grad = torch.ones_like(weight)
        self.optimizer.step(closure)

    def state(self) -> dict[str, torch.Tensor]:
        moments = {
            f"{key} of {name}": moment
            for name, weight in self.weights.items()
            for key, moment in self.optimizer.state[weight].items()
        }
        return {**{name: weight.detach() for name, weight in self.weights.items()}, **moments, **self.buffers}

    def on_host(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu() for name, tensor in self.state().items()}

    def save(self, name: str = "saved") -> None:
        state: Any = self.state() if self.layout == "file" else [Part("model", self.state(), Kind.REPLICATED)]
        self.checkpointer.save(state, self.directory / name)

    def load(self, name: str = "saved") -> dict[str, torch.Tensor]:
        if self.layout == "file":
            return dict(self.checkpointer.load(self.directory / name, map_location="cpu"))
        with self.checkpointer.load(self.directory / name) as opened:
            return dict(opened.load("model", map_location="cpu"))

    def side_stream(self) -> torch.Stream:
        """Return the stream that copies; the first save, made here, creates it."""
        self.save("first")
        self.checkpointer.wait()
        return streams._side_streams[torch.device(self.device, 0)]


@pytest.fixture(params=["file", "directory"])
def training(request: pytest.FixtureRequest, accelerator: SimulatedAccelerator, tmp_path: Path) -> Iterator[Training]:
    made = Training(accelerator, request.param, tmp_path)
    yield made
    made.checkpointer.close(raises=False)


def values(tensor: torch.Tensor) -> list[float]:
    return tensor.cpu().unique().tolist()


def waits_on_the_host(save: Callable[[], None], side: torch.Stream, device: Any) -> bool:
    """Return whether a save does not return before its side stream has run."""
    device.module.pause(side)
    saving = threading.Thread(target=save)
    saving.start()
    saving.join(1.0)  # a save that does not wait returns much sooner
    waited = saving.is_alive()
    device.module.resume(side)
    saving.join()
    return waited


@pytest.mark.sampled(1)
def test_neither_the_save_nor_the_step_waits_on_the_host(training: Training) -> None:
    side, current = training.side_stream(), torch.accelerator.current_stream()
    expected = training.on_host()
    for stream in (current, side):
        training.module.pause(stream)
    try:
        assert returns(training.save, LONGEST_SECONDS)
        assert returns(training.step, LONGEST_SECONDS)
        assert training.checkpointer.is_busy
    finally:
        for stream in (current, side):
            training.module.resume(stream)
    training.checkpointer.wait()
    assert_same_state(training.load(), expected)
    assert training.on_host()["weight"].unique().tolist() != expected["weight"].unique().tolist()


@both_layouts
def test_the_device_waits_for_the_step_and_not_for_what_comes_before(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator
) -> None:
    training = Training(accelerator, layout, tmp_path, early=False)
    side = training.side_stream()
    expected = training.on_host()
    forward = torch.zeros(3, device=training.device)
    accelerator.module.pause(side)
    try:
        training.save()
        forward.fill_(1.0)
        assert returns(lambda: values(forward) == [1.0], LONGEST_SECONDS)
        # In a closure, as Lightning computes the whole step.
        assert returns(lambda: training.step(lambda: forward.add_(1.0).cpu()), LONGEST_SECONDS)
        step_is_done = torch.accelerator.current_stream().record_event()
        assert not step_is_done.query()
    finally:
        accelerator.module.resume(side)
    assert values(forward) == [2.0]
    training.checkpointer.close()
    assert_same_state(training.load(), expected)


@both_layouts
def test_a_save_inside_of_a_closure_is_waited_for(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator
) -> None:
    training = Training(accelerator, layout, tmp_path)
    training.side_stream()
    expected = training.on_host()
    with training.checkpointer, accelerator.module.lazy(side_streams_only=True):
        training.step(training.save)  # as in Lightning's on_before_optimizer_step
        training.checkpointer.wait()
        assert_same_state(training.load(), expected)


@pytest.mark.each_value
@both_layouts
@pytest.mark.parametrize("closure", [None, lambda: 0.0])
def test_a_save_inside_of_a_hook_before_the_step_is_waited_for(
    tmp_path: Path, layout: str, closure: Any, accelerator: SimulatedAccelerator
) -> None:
    training = Training(accelerator, layout, tmp_path)
    training.side_stream()
    saved: list[tuple[str, dict[str, torch.Tensor]]] = []

    def save(*_: Any) -> None:
        saved.append((f"{len(saved)}", training.on_host()))
        training.save(saved[-1][0])

    hooks = [register_optimizer_step_pre_hook(save)]
    try:
        for _ in range(2):
            hooks.append(training.optimizer.register_step_pre_hook(save))
            with accelerator.module.lazy(side_streams_only=True):
                training.step(closure)
    finally:
        for hook in hooks:
            hook.remove()
    training.checkpointer.close()
    assert len(saved) == 5
    for name, expected in saved:
        assert_same_state(training.load(name), expected)


def test_a_hook_that_changes_the_weights_before_the_step_waits(training: Training) -> None:
    training.side_stream()
    expected = training.on_host()

    def halve(*_: Any) -> None:
        training.weights["weight"].data.mul_(0.5)

    training.optimizer.register_step_pre_hook(halve)
    with training.module.lazy(side_streams_only=True):
        training.save()
        training.step()
    training.checkpointer.wait()
    assert_same_state(training.load(), expected)


@both_layouts
def test_a_step_on_another_stream_waits(tmp_path: Path, layout: str, accelerator: SimulatedAccelerator) -> None:
    training = Training(accelerator, layout, tmp_path, early=False)
    side, other = training.side_stream(), torch.Stream(device=torch.device(training.device, 0))
    expected = training.on_host()
    accelerator.module.pause(side)
    try:
        training.save()
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            training.step()
        assert not other.record_event().query()
    finally:
        accelerator.module.resume(side)
    training.checkpointer.close()
    other.synchronize()
    assert_same_state(training.load(), expected)


@both_layouts
def test_a_closure_of_an_optimizer_that_is_not_of_torch_is_not_trusted(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator
) -> None:
    class ChangesFirst(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            for weight in self.param_groups[0]["params"]:
                weight.data.add_(1.0)
            return closure()

    training = Training(accelerator, layout, tmp_path, early=False)
    side = training.side_stream()
    other = ChangesFirst(training.weights.values(), {})
    expected = training.on_host()
    accelerator.module.pause(side)
    try:
        training.save()
        other.step(lambda: 0.0)
        step_is_done = torch.accelerator.current_stream().record_event()
        assert not step_is_done.query()
    finally:
        accelerator.module.resume(side)
    training.checkpointer.close()
    assert_same_state(training.load(), expected)


@both_layouts
def test_every_step_is_saved_as_it_was(tmp_path: Path, layout: str, accelerator: SimulatedAccelerator) -> None:
    training = Training(accelerator, layout, tmp_path, max_pending=2)
    expected = []
    with training.checkpointer, accelerator.module.lazy(side_streams_only=True):
        for step in range(5):
            expected.append(training.on_host())
            training.save(str(step))
            training.buffers["buffer"].add_(1.0)  # not announced by any optimizer
            training.buffers["buffer"].data.mul_(2.0)
            training.step()
        training.checkpointer.wait()
        for step, wanted in enumerate(expected):
            assert_same_state(training.load(str(step)), wanted)


@pytest.mark.sampled(2)
@both_layouts
@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.SGD(weights, lr=1.0, momentum=0.5, fused=True),
        lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
        lambda weights: torch.optim.Adam(weights, lr=0.1, amsgrad=True, capturable=True, foreach=True),
    ],
    ids=["fused SGD", "fused AdamW", "capturable Adam"],
)
def test_every_step_of_an_optimizer_with_kernels_of_its_own_is_saved_as_it_was(
    tmp_path: Path, layout: str, make: Any, accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_late = hold_late_copies(monkeypatch.setattr)
    training = Training(accelerator, layout, tmp_path, max_pending=2)
    training.optimizer = make(training.weights.values())
    training.step()
    expected = []
    with training.checkpointer, accelerator.module.lazy(side_streams_only=True):
        for step in range(3):
            expected.append(training.on_host())
            training.save(str(step))
            training.step()
        training.checkpointer.wait()
        for step, wanted in enumerate(expected):
            assert_same_state(training.load(str(step)), wanted)
    assert was_late()
    assert not torch.equal(expected[0]["weight"], expected[1]["weight"])


@pytest.mark.sampled(1)
@both_layouts
def test_steps_that_a_scaler_skips_and_steps_that_it_takes(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_late_copies(monkeypatch.setattr)
    training = Training(accelerator, layout, tmp_path, max_pending=2)
    scaler = torch.amp.GradScaler(accelerator.type, init_scale=16.0)  # type: ignore[attr-defined]
    expected = []
    with training.checkpointer, accelerator.module.lazy(side_streams_only=True):
        for step in range(6):
            expected.append(training.on_host())
            training.save(str(step))
            scale = scaler.scale(torch.ones(1, device=accelerator.type))
            for weight in training.weights.values():
                weight.grad = torch.full_like(weight, float("inf") if step % 3 == 0 else 1.0) * scale
            scaler.step(training.optimizer)
            scaler.update()
        training.checkpointer.wait()
        for step, wanted in enumerate(expected):
            assert_same_state(training.load(str(step)), wanted)
    assert scaler.get_scale() == 4.0  # two steps were skipped
    weights = [wanted["weight"].unique().tolist() for wanted in expected]
    assert [weights[step + 1] == weights[step] for step in range(5)] == [True, False, False, True, False]


def test_what_a_save_does_on_the_host_does_not_depend_on_the_size(
    tmp_path: Path, accelerator: SimulatedAccelerator
) -> None:
    counts = []
    for size in (MIB, 16 * MIB):
        training = Training(accelerator, "file", tmp_path, early=False)
        training.weights = {"weight": torch.nn.Parameter(torch.ones(size // 4, device=training.device))}
        training.optimizer = torch.optim.SGD(training.weights.values(), lr=1.0, momentum=0.5)
        training.step()
        training.side_stream()
        before = accelerator.module.work_queued(), accelerator.module.host_waits()
        training.save()
        training.checkpointer.close()
        counts.append((accelerator.module.work_queued() - before[0], accelerator.module.host_waits() - before[1]))
    assert counts[0] == counts[1]


@both_layouts
def test_what_a_save_queues_for_tensors_of_odd_sizes_is_no_more_than_for_others(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator
) -> None:
    counts = []
    for more in (0, 2):  # additional elements of 4 bytes
        training = Training(accelerator, layout, tmp_path, early=False)
        weights = [torch.nn.Parameter(torch.ones(MIB // 4 + more, device=training.device)) for _ in range(30)]
        training.weights = {str(number): weight for number, weight in enumerate(weights)}
        training.optimizer = torch.optim.SGD(weights, lr=1.0)
        training.step()
        training.side_stream()
        gc.collect()  # freeing memory is work for the device, too
        before = accelerator.module.work_queued()
        training.save()
        training.checkpointer.close()
        counts.append(accelerator.module.work_queued() - before)
    assert counts[1] < counts[0] + len(weights) // 2  # not one more for each weight


# ---- changes that are not announced ----------------------------------------------------------------------------------


@pytest.mark.each_value
@both_layouts
@pytest.mark.parametrize("name", ["weight", "momentum_buffer of weight"])
def test_a_change_that_no_hook_sees_fails_the_save_and_later_ones_wait(
    tmp_path: Path, layout: str, name: str, accelerator: SimulatedAccelerator
) -> None:
    training = Training(accelerator, layout, tmp_path, early=False)
    side = training.side_stream()
    changed = training.state()[name]
    accelerator.module.pause(side)
    try:
        training.save()
        changed.data[MIB // 3].add_(1.0)  # one element, and autograd does not count the change
        assert values(changed) == [1.0, 2.0] or values(changed) == [0.0, 1.0]
    finally:
        accelerator.module.resume(side)
    with pytest.raises(SnapshotTornError, match="wait_staged"):
        training.checkpointer.wait()
    assert not training.checkpointer.exists(tmp_path / "saved")
    expected = training.on_host()
    assert waits_on_the_host(training.save, side, accelerator)
    changed.data.add_(1.0)
    training.checkpointer.close()
    assert_same_state(training.load(), expected)


def test_wait_staged_makes_such_a_change_safe(training: Training) -> None:
    expected = training.on_host()
    with training.module.lazy(side_streams_only=True):
        training.save()
        wait_staged()
        training.weights["weight"].data.add_(1.0)
        training.module.synchronize()
    training.checkpointer.wait()
    assert_same_state(training.load(), expected)


@both_layouts
def test_a_load_lets_the_device_wait_for_what_is_being_copied(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator
) -> None:
    training = Training(accelerator, layout, tmp_path, early=False)
    side = training.side_stream()
    training.step()
    expected = training.on_host()
    accelerator.module.pause(side)
    try:
        training.save()
        training.weights["weight"].data.copy_(training.load("first")["weight"].pin_memory(), non_blocking=True)
        is_loaded = torch.accelerator.current_stream().record_event()
        assert not is_loaded.query()
    finally:
        accelerator.module.resume(side)
    training.checkpointer.close()
    assert_same_state(training.load(), expected)


def test_every_optimizer_of_torch_calls_its_closure_before_it_changes_anything(
    accelerator: SimulatedAccelerator,
) -> None:
    kinds = [
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]
    assert len(kinds) >= 13
    for kind in kinds:
        weight = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = kind([weight], lr=0.1)

        def gradient(weight: torch.nn.Parameter = weight, kind: Any = kind) -> torch.Tensor:
            grad = torch.ones(4, 4)
            weight.grad = grad.to_sparse() if kind is torch.optim.SparseAdam else grad
            return weight.detach().sum()

        gradient()
        optimizer.step(gradient)
        found: list[Any] = []

        def first(
            found: Any = found, optimizer: Any = optimizer, weight: Any = weight, gradient: Any = gradient
        ) -> torch.Tensor:
            if not found:
                found.append([weight.detach().clone(), *_tensors(optimizer)])
            result: torch.Tensor = gradient()
            return result

        expected = [weight.detach().clone(), *_tensors(optimizer)]
        optimizer.step(first)
        assert_same_state(dict(enumerate(found[0])), dict(enumerate(expected)))


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value.clone() for value in values if isinstance(value, torch.Tensor)]


def test_sums_see_one_word_and_two_that_change_places(accelerator: SimulatedAccelerator) -> None:
    def differs(change: Callable[[torch.Tensor], Any]) -> bool:
        tensor = torch.arange(4 * ROW // 8, dtype=torch.int64, device=accelerator.type)
        memory = tensor.view(torch.uint8)
        sums = RowSums([[memory[:ROW]], [memory[ROW:]]])
        change(tensor)
        for piece in (memory[:ROW], memory[ROW:]):
            sums.add([piece])
        return sums.differ()

    assert not differs(lambda _: None)
    assert differs(lambda tensor: tensor[-1:].add_(1))
    assert differs(lambda tensor: tensor.view(torch.float32).neg_())
    assert differs(lambda tensor: tensor[:2].copy_(tensor[-2:]))
    assert differs(lambda tensor: tensor.copy_(tensor.flip(0)))


@pytest.mark.parametrize("joined", [ROW, 4 * ROW, 100 * ROW], ids=["none", "some", "all"])
def test_sums_see_every_part_of_tensors_of_any_size(
    accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch, joined: int
) -> None:
    monkeypatch.setattr(row_sums, "_JOINED", joined)
    fill_up = RowSums._filled_up

    def filled_up(self: RowSums, parts: list[torch.Tensor], nbytes: int) -> torch.Tensor:
        assert len({part.device for part in parts}) == 1  # CUDA does not join parts of several devices
        return fill_up(self, parts, nbytes)

    monkeypatch.setattr(RowSums, "_filled_up", filled_up)
    one = torch.arange(6 * ROW + 72, device=accelerator.type).to(torch.uint8)
    other = torch.arange(3 * ROW - 8, device=accelerator.type).add_(7).to(torch.uint8)
    elsewhere = torch.arange(ROW + 8, device=f"{accelerator.type}:1").to(torch.uint8)
    pieces = [one[: 2 * ROW + 8], one[2 * ROW + 8 : 5 * ROW], other, elsewhere, one[5 * ROW :]]
    groups = [pieces[:1], pieces[1:2], pieces[2:]]
    places = [
        (whole, at) for whole in (one, other, elsewhere) for at in [*range(5, len(whole), ROW // 2), len(whole) - 1]
    ]
    for place in (None, *places):
        sums = RowSums(groups)
        if place is not None:
            place[0][place[1]].add_(1)
        for group in groups:
            sums.add(group)
        assert sums.differ() == (place is not None), place


@both_layouts
def test_numbers_whose_signs_the_sums_do_not_see_are_copied_early(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator
) -> None:
    training = Training(accelerator, layout, tmp_path, early=False)
    training.weights = {"weight": torch.nn.Parameter(torch.ones(MIB, dtype=torch.float64, device=training.device))}
    training.optimizer = torch.optim.SGD(training.weights.values(), lr=1.0, momentum=0.5)
    training.step()
    expected = training.on_host()
    with accelerator.module.lazy(side_streams_only=True):
        training.save()
        training.weights["weight"].data.neg_()
        training.checkpointer.wait()
    assert_same_state(training.load(), expected)
    training.checkpointer.close()


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_buffer_is_not_used_again_while_something_is_copied_into_it(
    tmp_path: Path, accelerator: SimulatedAccelerator
) -> None:
    full = Fault("create", number=2, error=OSError(errno.ENOSPC, "No space left on device"))
    training = Training(accelerator, "file", tmp_path, storage=FaultyStorage(LocalStorage(), [full]))
    side = training.side_stream()
    training.module.pause(side)
    try:
        training.save()
        assert not training.checkpointer._pipeline.queue.wait(timeout=1.0)  # the save has failed, but is not over
        assert training.checkpointer._pipeline.buffers.exhausted
    finally:
        training.module.resume(side)
    with pytest.raises(StorageError):
        training.checkpointer.close()


def test_what_is_copied_is_let_go_of(training: Training) -> None:
    gc.collect()
    training.side_stream()
    before = training.module.live_bytes()
    training.save()
    training.checkpointer.wait()
    training.buffers.clear()
    gc.collect()
    assert before - training.module.live_bytes() == 4 * MIB


def test_much_that_no_optimizer_owns_is_copied_before_the_save_returns(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = training.side_stream()
    monkeypatch.setattr(device_copy, "EARLY_BYTES", MIB)
    # A full state that was gathered for the save must not stay when it returns.
    assert waits_on_the_host(training.save, side, training)
    training.checkpointer.wait()


# ---- where it cannot be done -----------------------------------------------------------------------------------------


def test_what_no_optimizer_has_changed_yet_is_copied_early(tmp_path: Path, accelerator: SimulatedAccelerator) -> None:
    weight = torch.ones(MIB, device=accelerator.type)
    torch.optim.SGD([weight.requires_grad_()], lr=1.0)  # the optimizer has made no step
    with accelerator.module.lazy(side_streams_only=True), Checkpointer(overlap=True) as checkpointer:
        checkpointer.save({"weight": weight.detach()}, tmp_path / "saved")
        weight.data.fill_(2.0)
        checkpointer.wait()
        found = checkpointer.load(tmp_path / "saved", map_location="cpu")
    assert found["weight"].unique().tolist() == [1.0]


@both_layouts
def test_a_device_without_streams_is_waited_for(
    tmp_path: Path, layout: str, accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core._devices.streams._side_streams", {})
    with accelerator.module.without_streams():
        training = Training(accelerator, layout, tmp_path)
        expected = training.on_host()
        training.save()
        training.weights["weight"].data.add_(1.0)
        training.buffers["buffer"].add_(1.0)
        training.checkpointer.wait()
        assert_same_state(training.load(), expected)
        training.checkpointer.close()


def test_memory_that_is_not_pinned_makes_nobody_save_something_else(
    tmp_path: Path, accelerator: SimulatedAccelerator
) -> None:
    with accelerator.module.limited_pinning(0):
        training = Training(accelerator, "file", tmp_path)
        expected = training.on_host()
        training.save()
        training.step()
        training.checkpointer.wait()
        assert_same_state(training.load(), expected)
        training.checkpointer.close()


def test_a_failure_of_the_device_fails_the_save_and_not_the_training(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.side_stream()

    def fail(*_: Any) -> None:
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(RowSums, "add", fail)
    with training.module.lazy(side_streams_only=True):
        training.save()
        training.step()
        with pytest.raises(CheckpointError, match="the device has gone"):
            training.checkpointer.wait()
        assert training.module.in_flight() == 0  # so that the buffer can be used again
    monkeypatch.undo()
    expected = training.on_host()
    training.save()
    assert_same_state(training.load(), expected)


def test_a_step_that_is_captured_does_not_wait_for_what_is_not_in_the_graph(
    tmp_path: Path, accelerator: SimulatedAccelerator
) -> None:
    training = Training(accelerator, "file", tmp_path, early=False)
    side = training.side_stream()
    accelerator.module.pause(side)
    try:
        training.save()
        with accelerator.module.capturing():
            training.optimizer.step()
        assert returns(torch.accelerator.current_stream().synchronize, LONGEST_SECONDS)
    finally:
        accelerator.module.resume(side)
    with pytest.raises(SnapshotTornError):  # this device has run the step, as a replay would have
        training.checkpointer.close()


@both_layouts
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_save_inside_of_a_capture_is_refused_before_anything_is_queued(
    tmp_path: Path, layout: str, strategy: Any, accelerator: SimulatedAccelerator
) -> None:
    state: Any = {"weight": torch.ones(MIB, device=accelerator.type)}
    checkpointers: Any = {"file": Checkpointer, "directory": DirectoryCheckpointer}
    gc.collect()  # freeing memory is work for the device, too
    with checkpointers[layout](strategy=strategy) as checkpointer:
        before = accelerator.module.work_queued(), accelerator.module.host_waits()
        with accelerator.module.capturing(), pytest.raises(CheckpointError, match=r"torch\.cuda\.graph"):
            checkpointer.save(state if layout == "file" else [Part("m", state, Kind.REPLICATED)], tmp_path / "saved")
        assert (accelerator.module.work_queued(), accelerator.module.host_waits()) == before
        assert not checkpointer.exists(tmp_path / "saved")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("interrupted", ["step", "streams"])
def test_a_signal_handler_saves_at_any_moment(interrupted: str, training: Training) -> None:
    saves = 0

    def handler() -> None:
        nonlocal saves
        saves += 1
        training.save()
        training.checkpointer.wait()

    def first_step() -> None:
        weight = torch.nn.Parameter(torch.ones(3, device=training.device))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=1.0).step()

    def first_stream() -> None:
        streams._side_streams.clear()
        streams.SideStreams(training.weights.values())

    act, file = (first_step, "device_copy.py") if interrupted == "step" else (first_stream, "_devices/streams.py")
    for run in at_every_moment((file,), handler, opcodes=False):
        run(act)
    assert saves > 5
    assert_same_state(training.load(), training.on_host())
