"""The flight recorder: what a resumed run reports about the steps that it repeats."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from ckpt_core.recorder import FlightRecorder, Record, Verdict, WeightSample, digest_batch, digest_generators
from ckpt_core.recorder.fingerprints import WHOLE_BYTES
from ckpt_core.recorder.flight_recorder import _WAITING_FOR_LOSS
from ckpt_core.recorder.ring import CAPACITY, Ring, record_path
from ckpt_core.state.rng import RngState
from tests.conftest import ScriptRunner
from tests.support.accelerators import CUDA, SIMULATED, Accelerator


def run(recorder: FlightRecorder, first: int, end: int, *, each: int = 4, **changes: dict[int, Any]) -> FlightRecorder:
    """Record steps that depend only on their number, except for ``changes``: for each name, values by step number."""
    for number in range(first, end):
        step = {"data": number, "generators": number, "rates": 1, "weights": number, "loss": 1.0 / (number + 1)}
        step |= {name: values[number] for name, values in changes.items() if number in values}
        recorder.record(number=number, epoch=number // each, batch=number % each, step=number + 1, **step)
    return recorder


class Runs:
    """Flight recorders of successive runs in one directory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "record")
        self.told: list[Verdict] = []

    def begin(self, saved: Any = None, **settings: Any) -> FlightRecorder:
        self.told.clear()
        recorder = FlightRecorder(self.path, self.told.append)
        if saved is not None:
            recorder.resume(saved, **settings)
        return recorder

    @property
    def verdict(self) -> Verdict:
        assert len(self.told) == 1
        return self.told[0]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def saved_at(runs: Runs, number: int, end: int) -> Any:
    first = run(runs.begin(), 0, number)
    saved = first.capture()
    run(first, number, end).close()
    return saved


def test_equal_steps_are_counted_and_said_once_at_their_end(runs: Runs) -> None:
    saved = saved_at(runs, 10, 47)
    resumed = run(runs.begin(saved), 10, 46)
    assert runs.told == []
    run(resumed, 46, 60)
    assert runs.verdict == Verdict(37, (), "37 repeated steps equal the first run's, bit for bit", is_alarm=False)


@pytest.mark.parametrize(
    ("what", "value"),
    [("data", 0), ("generators", 0), ("rates", 2), ("weights", 0), ("loss", 0.5), ("loss", float("nan"))],
)
def test_the_first_difference_is_said_once_with_its_step(runs: Runs, what: str, value: float) -> None:
    saved = saved_at(runs, 10, 20)
    run(runs.begin(saved), 10, 30, **{what: {13: value, 14: value}})
    assert (runs.verdict.steps, runs.verdict.differs, runs.verdict.is_alarm) == (3, (what,), True)
    assert "step 14 (epoch 3, batch 1)" in runs.verdict.message


def test_what_comes_first_in_a_step_is_named_first(runs: Runs) -> None:
    saved = saved_at(runs, 10, 20)
    run(runs.begin(saved), 10, 12, loss={10: 7.0}, data={10: 7}, generators={10: 7})
    assert runs.verdict.differs == ("generators", "data", "loss")
    assert "random numbers" in runs.verdict.message


def test_nan_equals_nan_and_what_one_run_does_not_know_is_not_compared(runs: Runs) -> None:
    first = run(runs.begin(), 0, 10)
    saved = first.capture()
    run(first, 10, 14, loss={10: float("nan"), 11: None}, data={12: None}).close()
    run(runs.begin(saved), 10, 14, loss={10: float("nan")}, weights={13: None})
    assert (runs.verdict.steps, runs.verdict.differs) == (4, ())


def test_another_place_in_the_data_is_named(runs: Runs) -> None:
    saved = saved_at(runs, 10, 20)
    run(runs.begin(saved), 10, 12, each=5)
    assert runs.verdict.differs == ("position",)


def test_a_resume_that_ends_early_says_what_it_has_compared(runs: Runs) -> None:
    saved = saved_at(runs, 10, 20)
    run(runs.begin(saved), 10, 13).finish()
    assert runs.verdict.steps == 3


def test_a_run_that_ended_at_its_checkpoint_leaves_nothing_to_compare(runs: Runs) -> None:
    saved = saved_at(runs, 10, 10)
    run(runs.begin(saved), 10, 30, data={12: 99}).finish()
    assert runs.told == []


def test_several_resumes_compare_with_the_run_that_got_furthest(runs: Runs) -> None:
    saved = saved_at(runs, 10, 30)
    second = run(runs.begin(saved), 10, 14)
    later = second.capture()
    run(second, 14, 16).close()
    run(runs.begin(later), 14, 40)
    assert (runs.verdict.steps, runs.verdict.differs) == (16, ())


def test_going_back_to_an_older_checkpoint_compares_from_there(runs: Runs) -> None:
    first = run(runs.begin(), 0, 5)
    older = first.capture()
    newer = run(first, 5, 10).capture()
    run(first, 10, 20).close()
    run(runs.begin(newer), 10, 15).close()
    run(runs.begin(older), 5, 30)
    assert (runs.verdict.steps, runs.verdict.differs) == (15, ())


def test_what_a_run_did_that_differed_is_not_held_against_another(runs: Runs) -> None:
    first = run(runs.begin(), 0, 10)
    saved = first.capture()
    run(first, 10, 20).close()
    other = dict.fromkeys(range(12, 25), -1.0)
    second = run(runs.begin(saved), 10, 15, loss=other)
    assert runs.verdict.differs == ("loss",)
    of_second = second.capture()
    run(second, 15, 25, loss=other).close()
    # the second run, resumed, repeats itself
    run(runs.begin(of_second), 15, 26, loss=other)
    assert (runs.verdict.steps, runs.verdict.differs) == (10, ())
    # the first run's checkpoint is not concerned: that run's own steps 10 and 11 are still recorded
    run(runs.begin(saved), 10, 30)
    assert (runs.verdict.steps, runs.verdict.differs) == (2, ())


def test_a_resume_without_anything_to_compare_has_a_branch_of_its_own(runs: Runs) -> None:
    saved = saved_at(runs, 10, 10)
    run(runs.begin(saved), 10, 20, rates=dict.fromkeys(range(10, 20), 5)).close()  # with other rates
    run(runs.begin(saved), 10, 20)
    assert runs.told == []


def test_nothing_is_compared_with_another_number_of_ranks_or_a_newer_version(runs: Runs) -> None:
    saved = saved_at(runs, 10, 20)
    recorder = runs.begin()
    recorder.resume(None)
    run(recorder, 10, 20, data={11: 0}).finish()
    run(runs.begin({**saved, "version": 2}), 10, 20, data={11: 0}).finish()
    assert runs.told == []


def test_a_new_run_in_the_directory_is_compared_with_nothing(runs: Runs) -> None:
    saved_at(runs, 10, 20)
    run(runs.begin(), 0, 20, data={3: 99}).finish()
    assert runs.told == []


def test_what_the_user_was_told_already_is_no_second_alarm(runs: Runs) -> None:
    saved = saved_at(runs, 10, 20)
    run(runs.begin(saved, known_inexact=True), 10, 20, data={11: 0})
    assert (runs.verdict.differs, runs.verdict.is_alarm) == (("data",), False)


def test_a_batch_that_is_read_again_is_compared_with_the_checkpoint_alone(tmp_path: Path) -> None:
    told: list[Verdict] = []
    first = run(FlightRecorder(None, told.append), 0, 10)
    for data, expected in ((9, []), (8, [("data",)])):
        second = FlightRecorder(None, told.append)
        second.resume(first.capture())
        second.read_again(2, 1, data)
        second.read_again(5, 1, 1)  # a batch of which there is no record
        assert [verdict.differs for verdict in told] == expected


def test_torn_and_foreign_records_are_not_there(runs: Runs) -> None:
    saved = saved_at(runs, 10, 20)
    with open(runs.path, "r+b") as file:
        file.seek(12 * 128 + 40)
        file.write(b"torn")
        file.seek(13 * 128)
        file.write(bytes(128))
        file.truncate(18 * 128 + 50)
    run(runs.begin(saved), 10, 30)
    assert (runs.verdict.steps, runs.verdict.differs) == (6, ())


def test_the_file_holds_the_last_steps_and_no_more(runs: Runs) -> None:
    first = run(runs.begin(), 0, CAPACITY - 10)
    saved = first.capture()
    run(first, CAPACITY - 10, CAPACITY + 50).close()
    assert os.path.getsize(runs.path) == CAPACITY * 128
    run(runs.begin(saved), CAPACITY - 10, CAPACITY + 51)
    assert (runs.verdict.steps, runs.verdict.differs) == (60, ())


def test_a_record_comes_back_as_it_was() -> None:
    record = Record(
        branch=2**62, number=2**40, epoch=1, batch=2, step=3, data=2**64 - 1, weights=None, loss=-0.5, is_noisy=True
    )
    assert Record.unpack(record.pack()) == record
    whole = dataclasses.replace(record, generators=0, rates=1, weights=2, gradients=3, rate=0.1, seconds=0.2, time=1e9)
    assert Record.unpack(whole.pack()) == whole


def test_a_record_of_before_gradients_were_compared_has_none() -> None:
    layout = struct.Struct("<IIQQQIIQQQQdddd")
    body = layout.pack(0x31544C46, 1 | 8, 5, 6, 7, 1, 2, 11, 0, 0, 12, 0.0, 0.1, 0.2, 1e9).ljust(120, b"\0")
    record = Record.unpack(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)))
    assert record == Record(
        branch=5, number=6, step=7, epoch=1, batch=2, data=11, weights=12, rate=0.1, seconds=0.2, time=1e9
    )


def test_records_survive_sigkill(fork_script: ScriptRunner, tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from ckpt_core.recorder.ring import Record, Ring\n"
        "ring = Ring(sys.argv[1])\n"
        "for n in range(5): ring.write(Record(branch=1, number=n, epoch=0, batch=n, step=n))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = str(tmp_path / "record")
    done = fork_script(script, path, check=False)
    assert done.returncode == -signal.SIGKILL
    ring = Ring(path)
    assert [record.number for record in ring.read()] == list(range(5))
    ring.close()


def test_two_runs_in_one_directory_do_not_record_into_one_file(fork_script: ScriptRunner, tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    ring = Ring(path)
    ring.write(Record(branch=1, number=0, epoch=0, batch=0, step=0))
    script = (
        "import sys\nfrom ckpt_core.recorder.ring import Record, Ring\nring = Ring(sys.argv[1])\n"
        "ring.write(Record(branch=2, number=0, epoch=0, batch=0, step=0))\nassert ring.read() == []\n"
    )
    fork_script(script, path)
    assert [record.branch for record in ring.read()] == [1]
    ring.close()


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recorder = run(FlightRecorder(str(tmp_path / "file" / "record"), pytest.fail), 0, 3)
    assert len(recorder.capture()["records"]) == 3 * 128


def test_records_lie_beside_the_directory_of_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert record_path(str(tmp_path / "run" / "checkpoints"), 3) == str(tmp_path / "run" / ".checkpoints.flight-rank3")
    monkeypatch.chdir(tmp_path)
    assert record_path(".", 0) == str(tmp_path / f".{tmp_path.name}.flight-rank0")


# ---- digests ---------------------------------------------------------------------------------------------------------


class Foreign:
    """An object of a class that the recorder does not know."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.made_at = values, object()


def batches() -> list[Any]:
    zeros = torch.zeros(4, 6)
    one = zeros.clone()
    one[3, 5] = 1
    nested = [zeros, {"a": one, "b": ["x", 1, 2.5, None, True]}]
    return [
        zeros,
        one,
        zeros.view(6, 4),
        zeros.to(torch.bfloat16),
        one.to(torch.bfloat16),
        one.t(),
        one.numpy(),
        one.bool(),
        one[:, ::2],
        one[:, 1::2],
        nested,
        [zeros, {"a": zeros, "b": ["x", 1, 2.5, None, True]}],
        [zeros, {"a": one, "b": ["y", 1, 2.5, None, True]}],
        (zeros, one),
        ["a", "b"],
        ["ab"],
        Foreign(zeros),
        Foreign(one),
        np.array(["a", "b"], dtype=object),
        np.array(["a", "c"], dtype=object),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 3j]),
        torch.zeros(0, 3),
        {"a": 1},
        {"b": 1},
    ]


def test_different_batches_have_different_digests_and_equal_ones_the_same() -> None:
    first, second = [digest_batch(batch) for batch in batches()], [digest_batch(batch) for batch in batches()]
    assert first == second
    assert len(set(first)) == len(first)


def test_a_digest_is_the_same_in_another_process_and_changes_nothing(fork_script: ScriptRunner) -> None:
    code = "import torch\nfrom ckpt_core.recorder import digest_batch\nprint(digest_batch([torch.arange(5.), 'a', {1: 2}]))"
    done = fork_script(code)
    batch = torch.arange(5.0)
    assert int(done.stdout) == digest_batch([batch, "a", {1: 2}])
    batch.resize_(100)  # would raise if the digest had used Tensor.numpy()


def test_one_sample_of_a_large_batch_shows() -> None:
    batch = torch.zeros(64, 3, 32, 32)
    assert batch.nbytes < WHOLE_BYTES
    large = torch.zeros(64, 3, 128, 128)
    before = digest_batch(large)
    for sample in range(64):
        large[sample] = torch.rand(3, 128, 128)
        after = digest_batch(large)
        assert after != before
        before = after
    channels_last = large.to(memory_format=torch.channels_last)
    assert digest_batch(channels_last) == digest_batch(channels_last.clone())


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), np.random.rand, random.random],
)
def test_each_global_generator_shows(draw: Any) -> None:
    before = RngState.capture()
    digests = digest_generators(), digest_generators(before)
    draw()
    assert digest_generators() != digests[0]
    assert digest_generators(RngState.capture()) != digests[1]
    before.restore()
    assert (digest_generators(), digest_generators(before)) == digests


def test_a_change_of_any_layer_shows_in_the_sample_of_the_weights() -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)], torch.nn.BatchNorm1d(4))
    sample = WeightSample(module)
    for tensor in [*module.parameters(), module[3].running_mean]:
        before = sample.digest()
        with torch.no_grad():
            tensor.view(-1)[0] += 1
        assert sample.digest() != before


def test_a_loss_that_is_late_is_recorded_and_compared(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        there = False

        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

        def is_there(self) -> bool:
            return Late.there

        def take(self) -> float:
            return float(self.value)

    monkeypatch.setattr("ckpt_core.recorder.flight_recorder._value_of", lambda loss: (None, Late(loss)))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    saved = saved_at(runs, 0, 4)  # nothing is written: the losses were not available when the run died
    assert not os.path.exists(runs.path)
    first = runs.begin()
    saved = first.capture()
    run(first, 0, 4).finish()
    resumed = run(runs.begin(saved), 0, 4, loss={2: 5.0})
    assert runs.told == []
    Late.there = True
    run(resumed, 4, 5)
    assert (runs.verdict.steps, runs.verdict.differs) == (2, ("loss",))
    Late.there = False
    many = run(runs.begin(), 0, _WAITING_FOR_LOSS + 5)
    assert len(many._last) == 5  # steps that waited too long are recorded without their loss
    # a checkpoint holds the batches of the other steps
    resumed = runs.begin(many.capture())
    known = [resumed.read_again(number // 4, number % 4, number) for number in range(_WAITING_FOR_LOSS + 5)]
    assert known == [None] * 5 + [True] * _WAITING_FOR_LOSS


@pytest.mark.parametrize(
    ("step", "factor", "is_said"),
    [(4, 1.008, False), (4, 1.02, True), (5, 1.008, False), (5, 1.02, True), (5, 0.0, True)],
)
def test_losses_of_kernels_that_are_not_deterministic_may_be_a_little_apart(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, step: int, factor: float, is_said: bool
) -> None:
    class There:
        def __init__(self, value: float) -> None:
            self.value = value

        def is_there(self) -> bool:
            return True

        def take(self) -> float:
            return self.value

    monkeypatch.setattr("ckpt_core.recorder.flight_recorder._value_of", lambda loss: (None, There(loss)))
    first = run(runs.begin(), 0, 4)
    saved = first.capture()
    run(first, 4, 6, loss={4: float("nan")} if step == 5 else {})
    first.close()
    changed = {4: float("nan")} if step == 5 else {}
    run(runs.begin(saved), 4, 6, loss={**changed, step: factor / (step + 1)}, weights={4: 77, 5: 78})
    assert runs.verdict.differs == (("loss",) if is_said else ())
    assert ("because kernels are not deterministic, or because" in runs.verdict.message) == (not is_said)


@pytest.mark.parametrize("accelerator", [SIMULATED, CUDA], indirect=True)
def test_the_weights_on_a_device_are_compared_where_kernels_are_deterministic(
    runs: Runs, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(accelerator.type)
    sample = WeightSample(module)

    def record(recorder: FlightRecorder, number: int, weight: float) -> None:
        with torch.no_grad():
            accelerator.busy()
            module[0].weight.fill_(weight)
        recorder.record(number=number, epoch=0, batch=number, step=number + 1, weights=sample.digest())

    first = runs.begin()
    record(first, 0, 0.0)
    saved = first.capture()
    record(first, 1, 1.0)
    record(first, 2, 2.0)
    first.finish()
    resumed = runs.begin(saved)
    record(resumed, 1, 1.0)
    record(resumed, 2, 2.5)
    resumed.finish()
    assert (runs.verdict.steps, runs.verdict.differs) == (1, ("weights",))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert sample.digest() is None


class Counted:
    """An object that counts how often its ``__dict__`` is read."""

    looks = 0

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        Counted.looks += 1
        return {"n": self.others}

    others: list[Counted]


@pytest.mark.parametrize("kind", ["graph", "lists", "mapping"])
def test_no_batch_takes_long_to_look_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "looks", 0)
    nodes = [Counted() for _ in range(300)]
    for node in nodes:
        node.others = nodes if kind == "graph" else []
    batches = {"graph": nodes[0], "lists": [nodes] * 300, "mapping": {i: {0: nodes} for i in range(300)}}
    assert digest_batch(batches[kind]) == digest_batch(batches[kind])
    assert 0 < Counted.looks < 20_000


def test_lists_of_numbers_that_differ_in_length_or_in_a_sampled_number_differ() -> None:
    lists = [list(range(2000)) for _ in range(50)]
    other = [[*numbers] for numbers in lists]
    assert digest_batch(lists) == digest_batch(other)
    other[20][0] = -1
    assert digest_batch(lists) != digest_batch(other)
    assert digest_batch(lists) != digest_batch(lists[:-1])


def test_the_file_is_made_for_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".flight"
    ring = Ring(str(path))
    assert ring.read() == []
    assert list(tmp_path.iterdir()) == []
    ring.write(Record(branch=1, number=3, epoch=0, batch=3, step=3))
    ring.close()
    ring.write(Record(branch=1, number=4, epoch=0, batch=4, step=4))
    assert [record.number for record in Ring(str(path)).read()] == [3]


class Closed(Mapping[str, Any]):
    """A mapping whose items cannot be read any more, as with a file that was closed."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("closed")

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


class Proxy:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not connected")


class Quantity(float):
    def __repr__(self) -> str:
        raise ValueError("no unit")


@pytest.mark.parametrize("odd", [Closed(), Proxy(), Quantity(2.0)], ids=lambda odd: type(odd).__name__)
def test_what_objects_of_a_batch_raise_ends_no_training(odd: Any) -> None:
    first, other = ({"odd": odd, "x": torch.full((2,), value)} for value in (1.0, 2.0))
    assert digest_batch(first) == digest_batch(dict(first))
    assert digest_batch(first) != digest_batch(other)
