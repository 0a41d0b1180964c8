"""The one-file layout: what is saved is loaded again, by this package's loader and by plain ``torch.load``."""

from __future__ import annotations

import collections
import io
import pickle
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_core import CheckpointCorruptedError, Checkpointer, CheckpointFormatError, SerializationError, verify
from ckpt_core._layouts.image import WINDOW
from ckpt_core._layouts.torch_file import archive as archive_module
from ckpt_core._layouts.torch_file import pickling
from ckpt_core._pipeline.loading import peek
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, storage_for
from tests.support.states import DTYPES, assert_same_state, raw_bytes, states, tensor_of


def save(state: Any, path: Path, strategy: str = "sync") -> Path:
    with Checkpointer(strategy=strategy) as checkpointer:
        checkpointer.save(state, path)
    return path


@pytest.fixture(scope="module", autouse=True)
def one_moment() -> Iterator[None]:
    """Let all saves be committed at the same time: two saves of one state differ in nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_module, "commit_time", lambda: 1.5)
        yield


def load(path: Path, **options: Any) -> Any:
    return Checkpointer(strategy="sync").load(path, **options)


def all_loaders(path: Path, **options: Any) -> list[Any]:
    return [load(path, **options), torch.load(path, **options), torch.load(path, mmap=True, **options)]


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, strategy: str, tmp_path: Path) -> None:
    state = {
        "scalar": tensor_of(dtype),
        "empty": tensor_of(dtype, 0),
        "empty rows": tensor_of(dtype, 3, 0, 2),
        "matrix": tensor_of(dtype, 7, 5),
        "transposed": tensor_of(dtype, 4, 6).T,
        "every second": tensor_of(dtype, 9)[::2],
        "middle": tensor_of(dtype, 9)[3:5],
        "expanded": tensor_of(dtype, 3, 1).expand(3, 4),
    }
    path = save(state, tmp_path / "a.ckpt", strategy)
    assert verify(path)
    for loaded in all_loaders(path):
        assert_same_state(loaded, state)


def test_the_same_dtypes_as_torch_has() -> None:
    covered = {*DTYPES, *(torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)}
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    # Shell types that hold no numbers torch can copy or print.
    shells = {
        dtype for dtype in found if str(dtype).startswith(("torch.bits", "torch.int", "torch.uint", "torch.float4"))
    }
    assert found - covered <= shells


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_shared_memory_stays_shared(strategy: str, tmp_path: Path) -> None:
    base = torch.arange(10.0)
    tied = torch.nn.Parameter(torch.randn(3, 4))
    state = {"base": base, "view": base[2:6], "one": tied, "other": tied, "deep": [{"again": tied.detach()}]}
    path = save(state, tmp_path / "a.ckpt", strategy)
    for loaded in all_loaders(path):
        assert_same_state(loaded, state)
        assert loaded["one"] is loaded["other"]
        loaded["base"][2] = 77.0
        assert loaded["view"][0] == 77.0
        with torch.no_grad():
            loaded["one"][0, 0] = 55.0
        assert loaded["deep"][0]["again"][0, 0] == 55.0
    with zipfile.ZipFile(path) as archive:
        assert sorted(name for name in archive.namelist() if "/data/" in name) == ["archive/data/0", "archive/data/1"]


def test_memory_without_bytes_that_is_shared(tmp_path: Path) -> None:
    empty = torch.empty(0, 4)
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    tied.register_buffer("one", empty)
    tied.register_buffer("other", empty.view(4, 0))
    state = {"model": tied.state_dict(), "rows": list(torch.empty(3, 0).unbind()), "behind": torch.arange(3)}
    path = save(state, tmp_path / "a.ckpt")
    for loaded in all_loaders(path):
        assert_same_state(loaded, state)
    assert verify(path)


@pytest.mark.filterwarnings("ignore:.*TypedStorage.*")
def test_memory_without_bytes_of_several_types(tmp_path: Path) -> None:
    """Torch saves such tensors, and gives all of them the type of the first when it maps the file."""
    empty = torch.empty(0, 4)
    state = {"a": empty, "b": empty.view(torch.int32), "c": empty.view(torch.bool), "d": empty.untyped_storage()}
    path = save(state, tmp_path / "a.ckpt")
    for loaded in all_loaders(path):
        for key in "abc":
            assert_same_state(loaded[key], state[key])
        assert loaded["d"].nbytes() == 0
    assert verify(path)


def of_part_of_an_element(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose memory has some bytes after its last whole element."""
    return tensor_of(torch.uint8, 67)[:64].view(dtype)[1:]


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_memory_that_ends_inside_an_element(strategy: str, tmp_path: Path) -> None:
    """Torch saves it, and refuses to load it."""
    tensors = {str(dtype): of_part_of_an_element(dtype) for dtype in DTYPES if dtype is not torch.bool}
    base = tensors["torch.float32"]
    state = {**tensors, "tied": base, "view": base[3:], "behind": torch.arange(3)}
    path = save(state, tmp_path / "a.ckpt", strategy)
    assert verify(path)
    for loaded in all_loaders(path):
        assert_same_state(loaded, state)
        loaded["tied"][3] = 7.5
        assert loaded["view"][0] == 7.5
    path = save({"late": Holder(x=base, y=of_part_of_an_element(torch.int64))}, tmp_path / "b.ckpt", strategy)
    for loaded in all_loaders(path, weights_only=False):
        assert_same_state(loaded["late"].x, base)


def test_memory_that_ends_inside_an_element_as_older_versions_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OldTable(pickling.StorageTable):
        def add(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> int:
            index = super().add(storage, dtype)
            self.sizes[index] = storage.nbytes()
            return index

    monkeypatch.setattr(archive_module, "StorageTable", OldTable)
    state = {"a": of_part_of_an_element(torch.float64), "b": of_part_of_an_element(torch.int16), "c": torch.ones(2)}
    path = save(state, tmp_path / "a.ckpt")
    assert verify(path)
    assert_same_state(load(path), state)
    path.write_bytes(path.read_bytes().replace(raw_bytes(state["a"]), bytes(56), 1))
    with pytest.raises(CheckpointCorruptedError) as caught:
        load(path)
    assert caught.value.key == "a"


@pytest.mark.parametrize("place", ["meta", {"cpu": "meta"}], ids=str)
def test_shared_memory_on_the_meta_device(place: Any, tmp_path: Path) -> None:
    base = torch.arange(10.0)
    path = save({"base": base, "view": base[2:6], "other": torch.ones(3)}, tmp_path / "a.ckpt")
    for loaded in [load(path, map_location=place), torch.load(path, map_location=place)]:
        found = {key: (tensor.is_meta, tuple(tensor.shape)) for key, tensor in loaded.items()}
        assert found == {"base": (True, (10,)), "view": (True, (4,)), "other": (True, (3,))}


def test_damage_behind_shared_memory_is_named_by_its_own_key(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    state = {"base": base, "view": base[2:6], "other": torch.full((3,), 7.5)}
    path = save(state, tmp_path / "a.ckpt")
    damaged = path.read_bytes().replace(raw_bytes(state["other"]), bytes(12))
    path.write_bytes(damaged)
    with pytest.raises(CheckpointCorruptedError) as caught:
        load(path)
    assert caught.value.key == "other"
    with pytest.raises(CheckpointCorruptedError) as caught:
        load(path, map_location="meta")
    assert caught.value.key == "other"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_tensors_larger_than_a_window_and_across_windows(strategy: str, tmp_path: Path) -> None:
    state = {
        "before": tensor_of(torch.uint8, WINDOW - 700),
        "across": tensor_of(torch.int16, 1000, seed=1),
        "nothing": torch.empty(0),
        "large": tensor_of(torch.uint8, 2 * WINDOW + 12345, seed=2),
        "to the end": tensor_of(torch.uint8, WINDOW // 2, seed=3),
        "after": tensor_of(torch.float32, 33, seed=4),
    }
    path = save(state, tmp_path / "a.ckpt", strategy)
    assert verify(path)
    for loaded in all_loaders(path):
        assert_same_state(loaded, state)


@pytest.mark.sampled(3)
@pytest.mark.extended_cells(
    "8",
    "16",
    "24",
    "40",
    "48",
    "56",
    "72",
    "80",
    "88",
    "104",
    "112",
    "120",
    "136",
    "144",
    "152",
    "168",
    "176",
    "184",
)
@pytest.mark.parametrize("short", [*range(0, 200, 8), 4032, 4096])
def test_headers_that_meet_the_end_of_a_window(short: int, tmp_path: Path) -> None:
    state = {
        "first": tensor_of(torch.uint8, WINDOW - short),
        **{f"empty {i}": torch.empty(0) for i in range(2)},
        "last": tensor_of(torch.uint8, 5, seed=1),
    }
    save(state, tmp_path / "sync.ckpt", "sync")
    assert_same_state(load(tmp_path / "sync.ckpt"), state)
    if short % 32 == 0:
        save(state, tmp_path / "async.ckpt", "async")
        assert (tmp_path / "sync.ckpt").read_bytes() == (tmp_path / "async.ckpt").read_bytes()


@given(state=states())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_state_comes_back_and_both_strategies_write_the_same_bytes(state: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sync = save(state, Path(folder, "sync.ckpt"), "sync")
        later = save(state, Path(folder, "async.ckpt"), "async")
        assert sync.read_bytes() == later.read_bytes()
        assert verify(sync)
        for loaded in all_loaders(sync):
            assert_same_state(loaded, state)


@st.composite
def views_of_shared_memory(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw views of a few memories: empty ones, of bytes after the last element, and the same view several times."""
    views: list[torch.Tensor] = []
    for seed in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype is not torch.bool]))
        count = draw(st.integers(0, 6))
        memory = tensor_of(torch.uint8, count * dtype.itemsize + draw(st.integers(0, 17)), seed=seed)
        base = memory[: count * dtype.itemsize].view(dtype)
        for _ in range(draw(st.integers(1, 4))):
            begin, end = sorted((draw(st.integers(0, count)), draw(st.integers(0, count))))
            views.append(base[begin : end : draw(st.integers(1, 2))])
    return draw(st.permutations([*views, *draw(st.lists(st.sampled_from(views), max_size=3))]))


@given(views=views_of_shared_memory(), strategy=st.sampled_from(["sync", "async"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_views_of_shared_memory_come_back_and_share_it(views: list[torch.Tensor], strategy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save({"views": views}, Path(folder, "a.ckpt"), strategy)
        assert verify(path)
        for loaded in all_loaders(path):
            assert_same_state(loaded["views"], views)
            assert sharing(loaded["views"]) == sharing(views)


def sharing(views: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return, for each view, the first that is the same object, and the first with the same (nonempty) memory."""
    objects = [id(view) for view in views]
    storages = [view.untyped_storage() for view in views]
    memories = [
        storage._cdata if storage.nbytes() >= view.itemsize else id(view)
        for view, storage in zip(views, storages, strict=True)
    ]
    return [(objects.index(one), memories.index(memory)) for one, memory in zip(objects, memories, strict=True)]


def test_views_with_conjugate_and_negative_bits_and_gradients(tmp_path: Path) -> None:
    z = torch.randn(4, dtype=torch.complex64)
    leaf = torch.randn(3, requires_grad=True)
    other = torch.randn(4, dtype=torch.complex64)
    state = {"conj": z.conj(), "neg": other.conj().imag, "z": z, "leaf": leaf, "frozen": torch.nn.Parameter(z, False)}
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    path = save(state, tmp_path / "a.ckpt")
    for loaded in (load(path), torch.load(path)):
        assert loaded["conj"].is_conj()
        assert loaded["neg"].is_neg()
        for name, tensor in state.items():
            assert torch.equal(loaded[name], tensor)
            assert loaded[name].requires_grad == tensor.requires_grad


def test_containers_keep_their_types_and_order(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = {
        "z": 1,
        "a": collections.OrderedDict(b=torch.ones(2), a=torch.zeros(1)),
        "counter": collections.Counter("aab"),
        "set": {1, 2, 3},
        "nested": [(), [], {}, (1, [2.5, {"x": None}]), b"bytes\xff", "text\u4e2d", True, -(2**80), 1j],
        "model": model.state_dict(),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    path = save(state, tmp_path / "a.ckpt")
    for loaded in all_loaders(path):
        assert_same_state(loaded, state)
        assert loaded["model"]._metadata == state["model"]._metadata


def test_one_object_twice_is_one_object_again(tmp_path: Path) -> None:
    shared = [1, torch.ones(2)]
    cycle: list[Any] = [0]
    cycle.append(cycle)
    path = save({"a": shared, "b": shared, "cycle": cycle}, tmp_path / "a.ckpt")
    loaded = load(path)
    assert loaded["a"] is loaded["b"]
    assert loaded["cycle"][1] is loaded["cycle"]


class Holder:
    """An object that only pickle can look into."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_tensors_inside_custom_objects(strategy: str, tmp_path: Path) -> None:
    shared = tensor_of(torch.float32, 11, seed=5)
    state = {
        "first": Holder(hidden=tensor_of(torch.int64, 300, seed=1), also=shared),
        "plain": tensor_of(torch.float16, 50, seed=2),
        "second": Holder(hidden=tensor_of(torch.uint8, 70_001, seed=3), empty=torch.empty(0)),
        "shared": shared,
        "last": tensor_of(torch.float64, 9, seed=4),
    }
    path = save(state, tmp_path / "a.ckpt", strategy)
    assert verify(path)
    for loaded in all_loaders(path, weights_only=False):
        for name in ("plain", "shared", "last"):
            assert_same_state(loaded[name], state[name])
        for name in ("first", "second"):
            assert_same_state(vars(loaded[name]), vars(state[name]))
        loaded["shared"][0] = 3.25
        assert loaded["first"].also[0] == 3.25
    with torch.serialization.safe_globals([Holder]):
        assert_same_state(vars(load(path)["second"]), vars(state["second"]))


class Order:
    """Pickles its tensors in another order than that in which the walk over the state meets them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return Order, tuple(reversed(self.tensors))


def test_objects_that_refer_to_tensors_in_another_order(tmp_path: Path) -> None:
    a, b, c = (tensor_of(torch.int32, size, seed=size) for size in (10, 20, 30))
    state = {"order": Order(a, b, tensor_of(torch.int32, 40)), "c": c, "b": b, "a": a}
    path = save(state, tmp_path / "a.ckpt")
    for loaded in all_loaders(path, weights_only=False):
        for name in "abc":
            assert_same_state(loaded[name], state[name])
        assert [tensor.numel() for tensor in loaded["order"].tensors] == [40, 20, 10]
        assert loaded["order"].tensors[1].data_ptr() == loaded["b"].data_ptr()


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_plain_data_that_the_walk_does_not_look_into(strategy: str, tmp_path: Path) -> None:
    """Their tensors come later in the file than in the pickle."""
    inside = tensor_of(torch.int32, 3, seed=1)
    ordered = collections.OrderedDict(a=tensor_of(torch.int32, 4, seed=2))
    ordered.extra = tensor_of(torch.int32, 5, seed=3)  # type: ignore[attr-defined]
    state = {"set": {inside}, "ordered": ordered, "w": tensor_of(torch.int32, 6, seed=4), "again": inside}
    path = save(state, tmp_path / "a.ckpt", strategy)
    for loaded in all_loaders(path):
        (found,) = loaded["set"]
        assert found is loaded["again"]
        assert_same_state(found, inside)
        assert_same_state(loaded["ordered"].extra, ordered.extra)  # type: ignore[attr-defined]
        assert_same_state(loaded["ordered"]["a"], ordered["a"])
        assert_same_state(loaded["w"], state["w"])


@pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning", "ignore:.*Sparse.*", "ignore:.*TypedStorage.*")
def test_sparse_and_quantised_tensors(tmp_path: Path) -> None:
    dense = torch.tensor([[0.0, 1.5, 0.0], [2.5, 0.0, 0.0]])
    state = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(dense, 0.5, 1, torch.quint8),
        "per channel": torch.quantize_per_channel(
            dense, torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), axis=0, dtype=torch.qint8
        ),
        "dense": dense,
    }
    path = save(state, tmp_path / "a.ckpt", "async")
    for loaded in (load(path), torch.load(path)):
        assert list(loaded) == list(state)
        for name, tensor in state.items():
            assert loaded[name].layout == tensor.layout
            assert loaded[name].dtype == tensor.dtype
            restored, expected = (
                (x.dequantize() if x.is_quantized else x.to_dense() if x.layout is not torch.strided else x)
                for x in (loaded[name], tensor)
            )
            assert torch.equal(restored, expected), name


def test_a_program_that_has_its_sparse_tensors_checked(tmp_path: Path) -> None:
    """Loads that read no bytes check no tensors, and leave none of theirs for the process's next load to check."""
    dense = torch.eye(64)
    quantised = torch.quantize_per_tensor(dense, 0.5, 1, torch.quint8)  # no load can build it on the meta device
    state = {"sparse": dense.to_sparse(), "quantised": quantised}
    with torch.sparse.check_sparse_tensor_invariants():
        path = save(state, tmp_path / "a.ckpt")
        loaded = load(path)
        peeked = peek(str(path), storage=storage_for(path))
        assert torch.equal(loaded["sparse"].to_dense(), dense)
        assert peeked["sparse"].shape == dense.shape
        torch.save(torch.sparse_coo_tensor([[9]], [1.0], (2,), check_invariants=False), tmp_path / "wrong.ckpt")
        with pytest.raises(CheckpointFormatError, match="size is inconsistent with indices"):
            load(tmp_path / "wrong.ckpt")
        assert torch.sparse.check_sparse_tensor_invariants.is_enabled()


def test_nothing_is_left_of_the_state_that_was_in_the_buffer_before(tmp_path: Path) -> None:
    state = {"scalar": torch.tensor(1.0), "large": torch.ones(WINDOW // 4), "row": torch.ones(17)}
    with Checkpointer() as checkpointer:
        checkpointer.save({"w": torch.full((WINDOW + 9000,), 255, dtype=torch.uint8)}, tmp_path / "before.ckpt")
        checkpointer.wait()
        checkpointer.save(state, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == save(state, tmp_path / "b.ckpt", "sync").read_bytes()


def test_tensors_that_get_another_shape_while_the_file_is_written(tmp_path: Path) -> None:
    """The pickle, which is made on the writing thread, describes the state at the moment of the save."""
    turned, emptied, trained = torch.arange(6.0).reshape(2, 3), torch.arange(3.0), torch.zeros(2)
    state = {"turned": turned, "again": turned, "emptied": emptied, "trained": trained, "steps": [1]}
    continues = threading.Event()
    storage = FaultyStorage(LocalStorage(), [Fault("create", until=continues)])
    with Checkpointer(storage=storage) as checkpointer:
        checkpointer.save(state, tmp_path / "a.ckpt")
        turned.t_()
        emptied.resize_(0)
        trained.requires_grad_()
        state["steps"].append(2)  # type: ignore[attr-defined]
        continues.set()
    loaded = load(tmp_path / "a.ckpt")
    assert loaded["again"] is loaded["turned"]
    assert torch.equal(loaded["turned"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(loaded["emptied"], torch.arange(3.0))
    assert (loaded["trained"].requires_grad, loaded["steps"]) == (False, [1])


def test_typed_and_untyped_storages_and_meta_tensors(tmp_path: Path) -> None:
    storage = tensor_of(torch.uint8, 24).untyped_storage()
    path = save({"untyped": storage, "meta": torch.empty(3, 4, device="meta")}, tmp_path / "a.ckpt")
    for loaded in (load(path), torch.load(path)):
        assert loaded["untyped"].tolist() == storage.tolist()
        assert loaded["meta"].device.type == "meta"
        assert loaded["meta"].shape == (3, 4)


def test_two_types_over_one_memory_are_refused_with_a_remedy(tmp_path: Path) -> None:
    base = torch.zeros(4)
    for strategy in ("sync", "async"):
        with pytest.raises(SerializationError, match="different types") as caught:
            save({"a": base, "b": base.view(torch.int32)}, tmp_path / "a.ckpt", strategy)
        assert "clone" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*TypedStorage.*")
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_what_has_no_bytes_or_two_types_is_refused_by_its_key(strategy: str, tmp_path: Path) -> None:
    base = torch.zeros(4)
    refused = {
        "on the meta device": [
            torch.empty(3, device="meta").untyped_storage(),
            torch.empty(3, device="meta").storage(),
        ],
        "ZeroTensor is not serializable": [torch._efficientzerotensor(3), Holder(x=torch._efficientzerotensor(3))],
        "different types": [base.untyped_storage(), base.view(torch.int32).storage()],
    }
    for message, values in refused.items():
        for value in values:
            with pytest.raises(SerializationError, match=message) as caught:
                save({"a": base, "x": [1, value]}, tmp_path / "a.ckpt", strategy)
            assert caught.value.key == "x.1"
            assert "what to do" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_what_pickle_refuses_is_named_by_its_key(strategy: str, tmp_path: Path) -> None:
    class Failing:
        def __reduce__(self) -> Any:
            raise RuntimeError("only through inheritance")

    for value in (lambda: 1, Failing(), (i for i in ())):
        path = tmp_path / "a.ckpt"
        with Checkpointer(strategy=strategy) as checkpointer:
            checkpointer.save({"old": 1}, path)
            checkpointer.wait()
            with pytest.raises(SerializationError) as caught:
                checkpointer.save({"fine": torch.ones(1), "user": [{"bad": value}]}, path)
            assert caught.value.key == "user.0.bad"
            assert "what to do" in str(caught.value)
            checkpointer.save({"new": 1}, tmp_path / "b.ckpt")
        assert load(path) == {"old": 1}
        assert load(tmp_path / "b.ckpt") == {"new": 1}


def test_map_location_is_what_torch_makes_of_it(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.int8)}
    path = save(state, tmp_path / "a.ckpt")
    seen = []

    def remember(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append((storage.nbytes(), location))
        return storage

    for where in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, {}, remember, lambda *_: None, lambda s, _: s.clone()):
        assert_same_state(load(path, map_location=where), state)
    assert seen == [(24, "cpu"), (2, "cpu")]
    assert load(path, map_location="meta")["a"].device.type == "meta"


def test_saves_inside_and_outside_of_inference_mode_share_their_buffers(tmp_path: Path) -> None:
    state = {"a": torch.randn(100)}
    path = tmp_path / "a.ckpt"
    for start in (False, True):
        with Checkpointer(strategy="async") as checkpointer:
            for turn in range(4):
                with torch.inference_mode((turn % 2 == 0) == start):
                    state["a"] = torch.randn(100)
                    checkpointer.save(state, path)
                    checkpointer.wait()
                    assert torch.equal(checkpointer.load(path)["a"], state["a"])


def test_the_default_device_and_grad_mode_do_not_matter(tmp_path: Path) -> None:
    state = {"a": torch.randn(100, requires_grad=True)}
    with torch.device("meta"):
        for strategy in ("sync", "async"):
            path = save(state, tmp_path / f"{strategy}.ckpt", strategy)
            loaded = load(path)
            assert loaded["a"].device.type == "cpu"
            assert_same_state(loaded, state)


def test_python_reads_every_record_that_is_no_tensor(tmp_path: Path) -> None:
    state = {f"w{i}": tensor_of(torch.uint8, i * 37) for i in range(20)}
    path = save(state, tmp_path / "a.ckpt")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        assert len(set(names)) == len(names)
        assert archive.read("archive/version") == b"3\n"
        assert archive.read("archive/byteorder") == b"little"
        assert archive.read("archive/data.pkl")[:2] == b"\x80\x02"
        assert b'"digest":"xxh3_64"' in archive.read("archive/.ckpt_core/manifest.json")
        content = path.read_bytes()
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            if "/data/" in info.filename:
                name_length, extra_length = content[info.header_offset + 26], content[info.header_offset + 28]
                begin = info.header_offset + 30 + name_length + extra_length
                assert begin % 64 == 0
                index = int(info.filename.rpartition("/")[2])
                assert content[begin : begin + info.file_size] == raw_bytes(state[f"w{index}"])


def test_the_bytes_depend_on_nothing_but_the_state_and_the_time(tmp_path: Path) -> None:
    state = {"a": torch.arange(5), "b": {"c": 1}}
    one, two = save(state, tmp_path / "one.ckpt"), save(state, tmp_path / "two.ckpt")
    assert one.read_bytes() == two.read_bytes()


def test_tensors_are_reduced_as_torch_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_attribute = torch.zeros(2)
    with_attribute.note = "kept"  # type: ignore[attr-defined]
    with_metadata = collections.OrderedDict[str, Any]()  # as of a module without parameters
    with_metadata._metadata = {"": 1}  # type: ignore[attr-defined]
    base = torch.arange(6.0)
    state: dict[str, Any] = {
        **{str(dtype): tensor_of(dtype) for dtype in DTYPES},
        "views": [base, base[2:4], base.view(2, 3).t(), base[::2], base.expand(2, 6), base[:0]],
        "bits": [torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64).conj().imag],
        "gradients": [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(base)],
        "again": {"base": base, "list": [base], "scalar": torch.tensor(3.0), "long": [2**95 + 1, "Q"]},
        "dictionaries": [collections.OrderedDict(), with_metadata, with_attribute, torch.tensor(3)],
        "kinds": [
            torch.nested.nested_tensor([base, base[:2]]),
            torch.eye(2).to_sparse(),
            torch.empty(2, device="meta"),
        ],
    }
    state["hooked"] = torch.ones(2, requires_grad=True) * 1
    state["hooked"].register_hook(lambda gradient: gradient)
    with pytest.warns(UserWarning, match="hooks"):
        ours = pickled_in(save(state, tmp_path / "ours.ckpt"))
    monkeypatch.setattr(pickling.StorageTable, "add_plain", lambda table, tensor: None)
    with pytest.warns(UserWarning, match="hooks"):
        torchs = pickled_in(save(state, tmp_path / "torch.ckpt"))
    assert b"again" in ours and ours != torchs  # different code wrote the two
    assert what_it_builds(ours) == what_it_builds(torchs)


def pickled_in(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))


def what_it_builds(pickled: bytes) -> str:
    """Return which functions a pickle calls with which values, in order, and where it has one object several times."""
    calls: list[str] = []

    class Named:
        def __init__(self, text: str) -> None:
            self.text = text

        def __repr__(self) -> str:
            return self.text

        def __call__(self, *arguments: Any) -> Named:
            calls.append(f"{self}{arguments!r}")
            return Named(f"<result {len(calls)}>")

        def __setstate__(self, state: Any) -> None:
            calls.append(f"{self} gets {state!r}")

        def __setitem__(self, key: Any, value: Any) -> None:
            calls.append(f"{self}[{key!r}] = {value!r}")

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Named(f"{module}.{name}")

        def persistent_load(self, entry: Any) -> Any:
            return Named(f"<stored {entry!r}>")

    return "\n".join([repr(Reader(io.BytesIO(pickled)).load()), *calls])


def test_what_stock_torch_saved_loads_unverified(tmp_path: Path) -> None:
    state = {"a": torch.randn(5), "b": [1, "x"]}
    for zipped in (True, False):
        path = tmp_path / f"{zipped}.ckpt"
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        assert_same_state(load(path), state)
        assert verify(path) is False
