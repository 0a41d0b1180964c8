"""Plain values that an object has changed are found, captured without pickle, and restored."""

from __future__ import annotations

import ctypes
import enum
import io
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from multiprocessing import Array, Value
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_core.state import changed_values
from ckpt_core.state.changed_values import UNREAD, PlainState, fingerprint, looks_without_waiting, small
from tests.support.accelerators import CUDA, SIMULATED, Accelerator, SimulatedAccelerator


class Holder:
    def __init__(self) -> None:
        self.value: Any = None
        self.inner: Any = None


VALUES: dict[str, Any] = {
    "integer": 2**70,
    "float": float("inf"),
    "text": "a",
    "bytes": b"\0\1",
    "complex": 1j,
    "list": [1, [2.5, None], ("a", True)],
    "many integers": list(range(1000)),
    "many floats": [0.1 * i for i in range(1000)] + [float("inf")],
    "rows": [torch.full((2,), float(i)) for i in range(100)],
    "batches": [list(range(i, i + 70)) for i in range(5)],
    "deque": deque([1, 2]),
    "set": {3, 1, 2},
    "dictionary": {(1, "a"): [torch.ones(2)], 3: {}},
    "array": np.arange(6.0).reshape(2, 3),
    "times": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "number of NumPy": np.float32(1.5),
    "tensor": torch.arange(4, dtype=torch.bfloat16),
    "empty": [[], {}, np.zeros(0), torch.zeros(0)],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_its_type(name: str) -> None:
    owner, fresh = Holder(), Holder()
    plain, other = PlainState(owner), PlainState(fresh)
    owner.value = VALUES[name]
    buffer = io.BytesIO()
    torch.save(plain.capture(), buffer)
    buffer.seek(0)
    values, left_out = torch.load(buffer, weights_only=True)
    assert left_out == []
    assert other.restore(values) == []
    assert type(fresh.value) is type(owner.value)
    assert fingerprint(fresh.value) == fingerprint(owner.value)
    assert repr(fresh.value) == repr(owner.value)


@pytest.mark.parametrize("make", [lambda: [3, 1, 2], lambda: {1: 2}, lambda: np.arange(3), lambda: torch.arange(3)])
def test_what_was_changed_in_place_stays_the_same_object(make: Any) -> None:
    owner, fresh = Holder(), Holder()
    owner.inner, fresh.inner = Holder(), Holder()
    owner.inner.value, fresh.inner.value = make(), make()
    plain, other, same = PlainState(owner), PlainState(fresh), fresh.inner.value
    owner.inner.value[1] = 7
    other.restore(plain.capture()[0])
    assert fresh.inner.value is same
    assert int(same[1]) == 7


@pytest.mark.parametrize("make", [lambda: Value("d", 0.5), lambda: Array("i", [3, *range(1, 100)])])
def test_what_processes_share_is_set_where_they_share_it(make: Any) -> None:
    owner, fresh = Holder(), Holder()
    owner.inner, fresh.inner = make(), make()
    plain, other, same = PlainState(owner), PlainState(fresh), fresh.inner
    assert plain.capture() == ({}, [])
    if isinstance(owner.inner.get_obj(), ctypes.Array):
        owner.inner[99] = 7
    else:
        owner.inner.value = 7.0
    assert other.restore(plain.capture()[0]) == []
    assert fresh.inner is same
    assert (same[:] == [3, *range(1, 99), 7]) if isinstance(same.get_obj(), ctypes.Array) else (same.value == 7.0)


@pytest.mark.parametrize("opened", [io.BytesIO(b"read"), {"a": io.BytesIO()}, torch.zeros(1 << 25)])
def test_a_flag_of_what_no_other_process_has_is_left_to_who_opens_it_again(opened: Any) -> None:
    owner = Holder()
    owner.flag, owner.count, owner.name, owner.order, owner.file = False, 0, None, [1, 2], None  # type: ignore[attr-defined]
    plain = PlainState(owner)
    owner.flag, owner.count, owner.name, owner.order, owner.file = True, 1, "a", [2, 1], opened  # type: ignore[attr-defined]
    values, left_out = plain.capture()
    assert [*values] == ["order"]
    assert "count" in left_out
    owner.count = 2  # type: ignore[attr-defined]
    assert sorted(plain.capture()[0]) == ["count", "order"]
    owner.file = None  # type: ignore[attr-defined]
    assert sorted(plain.capture()[0]) == ["count", "flag", "name", "order"]


@pytest.mark.parametrize("opens", [False, True])
def test_a_flag_beside_a_value_of_the_thread_is_captured_unless_that_is_open(opens: bool) -> None:
    owner = Holder()
    owner.k = 0  # type: ignore[attr-defined]
    plain = PlainState(owner)
    owner.k, owner.local = 1, threading.local()  # type: ignore[attr-defined]
    owner.local.value = io.BytesIO() if opens else True  # type: ignore[attr-defined]
    values, left_out = plain.capture()
    assert ([*values], left_out) == (([], ["k"]) if opens else (["k"], []))


def test_a_list_in_the_place_of_a_dictionary_that_is_gone_is_looked_at_as_a_list() -> None:
    owner = Holder()
    owner.value = [False, [object()]]
    plain = PlainState(owner)
    owner.value[0] = True
    plain._types[id(owner.value)] = {}
    assert plain.capture()[1] == []


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize("make", [of_inference, lambda: torch.zeros(1).expand(3)], ids=["inference", "shared memory"])
def test_a_tensor_that_cannot_be_changed_in_place_is_replaced(make: Callable[[], torch.Tensor]) -> None:
    owner = types.SimpleNamespace(value=make())
    PlainState(owner).restore({"value": {**(small(torch.arange(3.0), is_kept=True) or {}), "in_place": True}})
    assert owner.value.tolist() == [0, 1, 2]


def test_only_changes_are_captured_and_large_ones_are_named() -> None:
    owner = Holder()
    owner.value, owner.inner, owner.cache = [0] * 300_000, [1, 2], {}  # type: ignore[attr-defined]
    plain = PlainState(owner)
    assert plain.capture() == ({}, [])
    owner.value[-1] = 1
    owner.cache[1] = 2  # type: ignore[attr-defined]
    assert plain.capture() == ({}, ["value"])


def test_data_is_what_has_arrays_and_no_times() -> None:
    x, took = np.zeros(3), 0.5
    owner = types.SimpleNamespace(
        samples=[{"x": x, "y": 3}],
        columns={"x": x, "y": [1, 2]},
        pairs=[(x, 1)],
        told={"x": x, "took": took},
        settings={"x": x, "pid": 3},
        steps=[{"x": x, "took": took}],
        copies=[{"x": x, "path": "/tmp/a"}],
        texts=[{"x": "a"}],
        took=took,
    )
    assert [*PlainState(owner).data()] == ["samples", "columns", "pairs"]


@pytest.mark.parametrize("kind", [list, enumerate])
def test_little_of_a_data_set_is_copied_before_it_is_left_out(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = types.SimpleNamespace(records=[])
    plain = PlainState(owner)
    records = [{"text": "a", "number": 1, "known": [1.0]} for _ in range(100_000)]
    owner.records = records if kind is list else dict(kind(records))
    copied = []
    encode = changed_values._encode
    monkeypatch.setattr(changed_values, "_encode", lambda *given: (copied.append(1), encode(*given))[1])
    assert plain.capture() == ({}, ["records"])
    assert len(copied) < 5


def test_a_shuffle_of_a_long_list_is_seen() -> None:
    order = list(range(1_000_000))
    before = fingerprint(order)
    order.sort(key=lambda i: i % 7)
    assert fingerprint(order) != before


@pytest.mark.parametrize(
    "value",
    [np.broadcast_to(np.zeros(1), (2**20, 2**20)), torch.zeros(1).expand(2**20, 2**20)],
    ids=["array", "tensor"],
)
def test_to_look_at_what_is_not_contiguous_does_not_copy_it(value: Any) -> None:
    # a copy would take 8 TiB
    assert fingerprint(value) == fingerprint(value)
    assert fingerprint(value) != fingerprint(value[:-1])


def test_a_file_that_is_mapped_into_memory_is_not_read(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data.bin", dtype=np.uint8, mode="w+", shape=(100,))
    before = fingerprint(mapped)
    mapped[3] = 1
    assert fingerprint(mapped) == before


def test_what_is_computed_from_a_mapped_file_is_captured_and_the_file_is_not(tmp_path: Path) -> None:
    owner, fresh = (types.SimpleNamespace(file=None, weights=None) for _ in range(2))
    plain = PlainState(owner)
    owner.file = np.memmap(tmp_path / "data.bin", np.float32, "w+", shape=(4,))
    owner.weights = np.ones_like(owner.file)  # of the same class, but not mapped
    owner.weights *= 3
    values, left_out = plain.capture()
    assert (list(values), left_out) == (["weights"], [])
    PlainState(fresh).restore(values)
    assert fresh.weights.tolist() == [3, 3, 3, 3]


def test_a_change_in_one_of_many_arrays_is_seen() -> None:
    arrays = [np.zeros(1000, np.float32) for _ in range(500)]
    before = fingerprint(arrays)
    arrays[250][999] = 1
    assert fingerprint(arrays) != before


def test_of_a_list_of_a_thousand_large_arrays_a_part_is_looked_at() -> None:
    # reads one page each: all of them would be 256 GiB
    arrays = [np.broadcast_to(np.zeros(1), (2**25,)) for _ in range(1000)]
    assert fingerprint(arrays) == fingerprint(list(arrays))


OF_OTHER_KINDS = {
    "date": np.datetime64("2020-01-01"),
    "nanoseconds": np.datetime64(1, "ns"),
    "duration": np.timedelta64(1, "s"),
    "extended": np.longdouble(1.5),
    "record": np.zeros(1, dtype=[("a", "f4")])[0],
    "records": np.zeros(3, dtype=[("a", "f4"), ("b", "i4")]),
    "masked": np.ma.masked_array([1.0, 2.0], [0, 1]),
    "dates in a list": [np.datetime64("2020-01-01")],
    "meta": torch.zeros(3, device="meta"),
    "several on meta": [torch.zeros(3, device="meta")] * 2,
    "quantized": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize:UserWarning")
@pytest.mark.parametrize("kind", OF_OTHER_KINDS)
def test_what_a_checkpoint_cannot_hold_is_left_out_and_named(kind: str) -> None:
    owner = types.SimpleNamespace(value=0)
    plain = PlainState(owner)
    owner.value = OF_OTHER_KINDS[kind]
    assert plain.capture() == ({}, ["value"])
    assert small(owner.value, is_kept=True) is None


class Phase(enum.Enum):
    WARM = 1
    HOT = 3


class Word(str, enum.Enum):
    WARM = "warm"
    HOT = "hot"


class Parts(enum.Flag):
    HEAD = 1
    BODY = 2


@pytest.mark.parametrize(
    ("first", "then"), [(Phase.WARM, Phase.HOT), (Word.WARM, Word.HOT), (Parts(0), Parts.HEAD | Parts.BODY)]
)
def test_a_member_of_an_enumeration_comes_back_and_none_is_changed(first: enum.Enum, then: enum.Enum) -> None:
    owner, fresh = Holder(), Holder()
    owner.value = fresh.value = first
    before = repr([*type(first)])
    plain, other = PlainState(owner), PlainState(fresh)
    owner.value = then
    values, left_out = plain.capture()
    assert left_out == []
    assert other.restore(values) == []
    assert fresh.value is then
    owner.value = first
    plain.restore(PlainState(fresh).copy(["value"]))
    assert owner.value is then
    assert repr([*type(first)]) == before


class NoText:
    def __repr__(self) -> str:
        raise ValueError("not now")


class Quantity(float):
    def __repr__(self) -> str:
        raise ValueError("no unit")


class Lazy(list[int]):
    def __iter__(self) -> Any:
        raise OSError("closed")


class Proxy:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not connected")


@pytest.mark.parametrize("odd", [Quantity(2), {NoText(): 1}, Lazy([1]), Proxy()], ids=lambda odd: type(odd).__name__)
def test_what_a_value_raises_when_it_is_looked_at_hides_no_other(odd: Any) -> None:
    owner = Holder()
    owner.odd, owner.count = odd, 1  # type: ignore[attr-defined]
    state = PlainState(owner)
    owner.count = 2  # type: ignore[attr-defined]
    assert list(state.changed()) == ["count"]
    assert list(state.capture()[0]) == ["count"]


def kept(value: Any) -> Any:
    """Capture and restore a value that a script is known to keep for a while; None if it is not captured."""
    source, target = Holder(), Holder()
    captured = small(value, is_kept=True)
    if captured is None:
        return None
    source.value, target.value = value, type(value)()
    PlainState(target).restore({"value": {**captured, "in_place": True}})
    return target.value


@pytest.mark.parametrize(
    "value",
    [defaultdict(list, {"a": [1.5]}), Counter(a=3), OrderedDict([("b", 1), ("a", 2)])],
    ids=lambda value: type(value).__name__,
)
def test_a_dictionary_with_a_class_of_its_own_is_filled_and_never_made(value: Any) -> None:
    found = kept(value)
    assert (type(found), found) == (type(value), value)
    assert list(found) == list(value)
    nowhere = Holder()
    del nowhere.value
    assert PlainState(nowhere).restore({"value": small(value, is_kept=True) or {}}) == ["value"]
    assert not hasattr(nowhere, "value")
    assert small(value) is None


@pytest.mark.parametrize("accelerator", [SIMULATED], indirect=True)
def test_what_is_on_a_device_comes_back_there(accelerator: SimulatedAccelerator) -> None:
    source, target, device = Holder(), Holder(), accelerator.type
    losses = [torch.full((), float(i), device=device) for i in range(500)]
    source.value, source.inner = [losses, {"row": torch.ones(2, device=device)}], torch.full((1,), 3.0, device=device)
    target.value, target.inner = [], torch.zeros(1, device=device)
    PlainState(target).restore(
        {n: {**(small(v, is_kept=True) or {}), "in_place": True} for n, v in vars(source).items()}
    )
    found, row = target.value
    assert {one.device.type for one in (*found, row["row"], target.inner)} == {device}
    assert (torch.stack(found).tolist(), row["row"].tolist(), target.inner.tolist()) == ([*range(500)], [1, 1], [3])
    plain = PlainState(source)
    source.inner = torch.full((1,), 4.0, device=device)
    target.inner = None
    PlainState(target).restore(plain.capture()[0])
    assert (target.inner.device.type, target.inner.tolist()) == (device, [4])
    assert small(losses) is small(losses, is_kept=True, waits=False) is None
    assert small([*losses, torch.ones(())], is_kept=True) is None, "nobody knows where the numbers belong"
    assert small([{"loss": loss} for loss in losses], is_kept=True) is None, "each would be waited for"


@pytest.mark.parametrize("accelerator", [SIMULATED, CUDA], indirect=True)
def test_the_numbers_of_what_is_on_a_device_are_looked_at(accelerator: Accelerator) -> None:
    values = {
        "number": torch.tensor(2.5),
        "large": torch.arange(300_000.0),
        "turned": torch.arange(600.0).view(20, 30).t(),
        "list": [torch.ones(3), {"a": torch.zeros(2, dtype=torch.bfloat16)}],
        "empty": torch.ones(0),
    }
    there = torch.utils._pytree.tree_map(lambda one: one.to(accelerator.type), values)
    known = {name: fingerprint(value) for name, value in there.items()}
    accelerator.busy()
    there["number"] += 1
    there["large"] += 1
    there["turned"][29, 19] = 0.0
    there["list"][1]["a"] = there["list"][1]["a"] + 1
    assert {name for name in known if fingerprint(there[name]) != known[name]} == {"number", "large", "turned", "list"}
    tensors = [torch.ones(3, device=accelerator.type), torch.arange(5, device=accelerator.type)]
    assert fingerprint(tensors, 64) == fingerprint([one.clone() for one in tensors], 64)


@pytest.mark.parametrize("accelerator", [SIMULATED], indirect=True)
def test_a_look_that_may_not_wait_for_a_device_sees_that_something_has_changed(
    accelerator: SimulatedAccelerator,
) -> None:
    holder = Holder()
    holder.value, holder.inner = torch.ones(3, device=accelerator.type), [torch.zeros(2, device=accelerator.type)]
    waits = accelerator.module.host_waits()
    plain = PlainState(holder)
    assert accelerator.module.host_waits() > waits
    known = plain.digests()
    holder.value += 1
    waits = accelerator.module.host_waits()
    with looks_without_waiting():
        assert {path: digest for path, (digest, _) in plain.changed().items()} == {"value": UNREAD}
        assert plain.digests()["inner"] == known["inner"]
    assert accelerator.module.host_waits() == waits
    holder.value -= 1
    with looks_without_waiting(False):
        assert plain.changed() == {}


def test_of_what_a_script_keeps_tensors_are_captured_too_and_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    losses = [weight * i for i in range(3)]
    found = kept([{"loss": loss, "row": torch.ones(2)} for loss in losses])
    assert [float(one["loss"]) for one in found] == [0, 1, 2]
    assert not any(one["loss"].requires_grad for one in found)
    stacked = kept(losses)
    stacked[0] += 5
    assert [float(one) for one in stacked] == [5, 1, 2], "each has memory of its own"
    assert small([torch.ones(2)]) is None
    assert small([torch.ones(2)] * 200_000, is_kept=True) is None
    assert small(torch.ones(1 << 20), is_kept=True) is None
    assert small([torch.ones(1), "text"], is_kept=True) is None
    assert small([np.array([object()])], is_kept=True) is None
