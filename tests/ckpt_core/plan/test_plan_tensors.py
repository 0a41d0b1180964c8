"""Which part of a tensor is on this rank: every kind that can be saved, and a clear refusal of the others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import placement_types as torch_placements
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_core._plan import LocalTensor, local_tensor
from ckpt_core.errors import CheckpointError, SerializationError
from ckpt_core.geometry import Box
from tests.conftest import ScriptRunner
from tests.support.states import DTYPES, tensor_of

RANK, WORLD_SIZE = 3, 8


def local(tensor: torch.Tensor, *, replicated: bool = True) -> LocalTensor:
    return local_tensor(tensor, key="net.x", rank=RANK, world_size=WORLD_SIZE, replicated=replicated)


def refusal(tensor: torch.Tensor) -> SerializationError:
    with pytest.raises(SerializationError, match=r"net\.x") as caught:
        local(tensor)
    assert caught.value.key == "net.x"
    assert caught.value.remedy
    return caught.value


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of 2 by 4 ranks, seen from rank 3, without processes."""
    dist.init_process_group("fake", rank=RANK, world_size=WORLD_SIZE, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


class Doubled(torch.Tensor):
    pass


class TestPlain:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(), (0, 4), (3, 5)])
    def test_of_every_dtype(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = tensor_of(dtype, *shape)
        found = local(tensor)
        [piece] = found.pieces
        assert (found.dtype, found.shape, found.holders) == (dtype, shape, tuple(range(WORLD_SIZE)))
        assert piece.box == Box.whole(shape)
        assert piece.tensor.data_ptr() == tensor.data_ptr()

    def test_of_one_rank(self) -> None:
        assert local(torch.ones(3), replicated=False).holders == (RANK,)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.nn.Parameter(torch.zeros(4, 6)),
            torch.nn.Buffer(torch.zeros(4, 6)),
            torch.zeros(6, 4).T,
            torch.zeros(8, 12)[::2, ::2],
            torch.zeros(1, 6, requires_grad=True).expand(4, 6),
            torch.nn.Linear(6, 4).weight,
        ],
        ids=["parameter", "buffer", "transposed", "strided", "expanded", "weight"],
    )
    def test_is_a_live_view_without_gradient(self, tensor: torch.Tensor) -> None:
        [piece] = local(tensor).pieces
        assert not piece.tensor.requires_grad
        assert (piece.tensor.data_ptr(), piece.tensor.stride()) == (tensor.data_ptr(), tensor.stride())

    def test_needs_no_import_of_distributed_tensors(self, run_script: ScriptRunner) -> None:
        script = """
            import sys, torch
            before = set(sys.modules)
            from ckpt_core._plan import WritePlanCache, local_tensor
            tensors = {"x": local_tensor(torch.ones(3), key="x", rank=0, world_size=1, replicated=True)}
            assert WritePlanCache().writes_of_rank(tensors, 0)["x"][0].tensor.sum() == 3
            print([name for name in set(sys.modules) - before if "distributed" in name])
        """
        assert run_script(script).stdout == "[]\n"


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


class TestRefused:
    def test_quantized(self) -> None:
        error = refusal(quantized())
        assert "quantized" in str(error)
        assert "dequantize" in str(error.remedy)

    def test_bytes_that_are_viewed_as_quantized(self) -> None:
        assert "quantized" in str(refusal(torch.zeros(3, dtype=torch.uint8).view(torch.qint8)))

    @pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), csr()], ids=["coo", "csr"])
    def test_sparse(self, tensor: torch.Tensor) -> None:
        assert f"layout {tensor.layout}" in str(refusal(tensor))

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested(self, layout: torch.layout) -> None:
        assert "ested" in str(refusal(nested(layout)))

    def test_meta(self) -> None:
        assert "meta device" in str(refusal(torch.empty(3, device="meta")))

    @pytest.mark.parametrize(
        "tensor",
        [torch.ones(3).as_subclass(Doubled), torch.nn.parameter.UninitializedParameter()],
        ids=["subclass", "lazy parameter"],
    )
    def test_other_subclasses(self, tensor: torch.Tensor) -> None:
        assert type(tensor).__qualname__ in str(refusal(tensor))

    @pytest.mark.parametrize("placement", [Partial(), Partial("avg")])
    def test_partial(self, mesh: DeviceMesh, placement: Partial) -> None:
        error = refusal(DTensor.from_local(torch.ones(3, 4), mesh, [placement, Shard(0)], run_check=False))
        assert "Partial" in str(error)
        assert "redistribute" in str(error.remedy)

    def test_a_cut_along_ranks_that_do_not_ascend(self, mesh: DeviceMesh) -> None:
        turned = DeviceMesh("cpu", [[3, 7], [2, 6]])
        tensor = DTensor.from_local(torch.ones(3, 4), turned, [Shard(0), Replicate()], run_check=False)
        assert "[[3, 7], [2, 6]]" in str(refusal(tensor))
        tensor = DTensor.from_local(torch.ones(3, 4), turned, [Replicate(), Shard(0)], run_check=False)
        assert local(tensor).holders == (2, 3)

    def test_a_distributed_tensor_of_a_subclass(self, mesh: DeviceMesh) -> None:
        inner = torch.ones(3, 4).as_subclass(Doubled)
        tensor = DTensor.from_local(inner, mesh, [Replicate(), Shard(0)], run_check=False)
        assert "Doubled" in str(refusal(tensor))

    def test_a_distributed_tensor_whose_parts_contradict_its_shape(self, mesh: DeviceMesh) -> None:
        tensor = DTensor.from_local(
            torch.ones(3, 4), mesh, [Replicate(), Shard(0)], run_check=False, shape=torch.Size((10, 4)), stride=(4, 1)
        )
        assert "puts [1, 4] on rank 3, but [3, 4] is there" in str(refusal(tensor))

    def test_a_part_where_there_should_be_none(self, mesh: DeviceMesh) -> None:
        tensor = DTensor.from_local(
            torch.ones(3, 4), mesh, [Replicate(), Shard(0)], run_check=False, shape=torch.Size((2, 4)), stride=(4, 1)
        )
        assert "puts nothing on rank 3, but [3, 4] is there" in str(refusal(tensor))


class TestDistributed:
    """Distributed tensors as seen from rank 3 of 8, at (0, 3) of the mesh."""

    def made(
        self, mesh: DeviceMesh, shape: tuple[int, ...], whole: tuple[int, ...], *placements: object
    ) -> LocalTensor:
        part = torch.empty(shape)
        stride = torch.empty(whole).stride()
        tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(whole), stride=stride)
        found = local(tensor)
        assert (found.dtype, found.shape) == (torch.float32, whole)
        assert all(piece.tensor.shape == piece.box.shape for piece in found.pieces)
        assert all(piece.tensor.untyped_storage().data_ptr() == part.data_ptr() for piece in found.pieces)
        return found

    def test_hsdp(self, mesh: DeviceMesh) -> None:
        found = self.made(mesh, (1, 6), (7, 6), Replicate(), Shard(0))
        assert [piece.box for piece in found.pieces] == [Box((6, 0), (1, 6))]
        assert found.holders == (3, 7)

    def test_replicated_over_all_of_the_mesh(self, mesh: DeviceMesh) -> None:
        found = self.made(mesh, (7,), (7,), Replicate(), Replicate())
        assert found.holders == tuple(range(8))

    def test_cut_twice(self, mesh: DeviceMesh) -> None:
        found = self.made(mesh, (4, 2), (8, 8), Shard(0), Shard(1))
        assert [piece.box for piece in found.pieces] == [Box((0, 6), (4, 2))]
        assert found.holders == (3,)

    def test_a_part_without_elements(self, mesh: DeviceMesh) -> None:
        found = self.made(mesh, (0, 4), (3, 4), Replicate(), Shard(0))
        assert (found.pieces, found.holders) == ((), ())

    def test_a_tensor_without_elements_is_wherever_its_mesh_is(self, mesh: DeviceMesh) -> None:
        found = local(
            DTensor.from_local(
                torch.empty(0, 1),
                mesh,
                [Replicate(), Shard(1)],
                run_check=False,
                shape=torch.Size((0, 4)),
                stride=(4, 1),
            )
        )
        assert [piece.tensor.shape for piece in found.pieces] == [(0, 4)]
        assert found.holders == tuple(range(8))

    def test_strided_parts(self, mesh: DeviceMesh) -> None:
        strided = torch_placements._StridedShard(0, split_factor=2)
        found = self.made(mesh, (2, 4), (16, 4), Shard(0), strided)
        # The 8 rows of the first half in 2 sections of 4, and the last quarter of each.
        assert [piece.box for piece in found.pieces] == [Box((3, 0), (1, 4)), Box((7, 0), (1, 4))]

    def test_on_a_slice_of_the_mesh_it_is_on_the_others_too(self, mesh: DeviceMesh) -> None:
        found = self.made(mesh["dp"], (2, 4), (4, 4), Shard(0))
        assert [piece.box for piece in found.pieces] == [Box((0, 0), (2, 4))]
        assert found.holders == (0, 1, 2, 3)
        found = self.made(mesh["tp"], (1, 4), (4, 4), Shard(0))
        assert [piece.box for piece in found.pieces] == [Box((3, 0), (1, 4))]
        assert found.holders == (3, 7)
        assert self.made(mesh["tp"], (4,), (4,), Replicate()).holders == tuple(range(8))

    def test_on_a_mesh_of_some_ranks(self, mesh: DeviceMesh) -> None:
        found = self.made(DeviceMesh("cpu", [2, 3]), (2, 4), (4, 4), Shard(0))
        assert [piece.box for piece in found.pieces] == [Box((2, 0), (2, 4))]
        assert found.holders == (3,)

    def test_on_a_mesh_without_this_rank(self, mesh: DeviceMesh) -> None:
        others = DeviceMesh("cpu", [6, 4, 5])
        tensor = DTensor.from_local(torch.empty(0), others, [Shard(0)], run_check=False, shape=(9,), stride=(1,))
        found = local(tensor)
        assert (found.shape, found.pieces, found.holders) == ((9,), (), ())

    def test_a_parameter_is_a_live_view_without_gradient(self, mesh: DeviceMesh) -> None:
        whole = torch.ones(7, 4, requires_grad=True)
        tensor = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        assert tensor.to_local().requires_grad
        for kind in (tensor, torch.nn.Parameter(tensor)):
            [piece] = local(kind).pieces
            assert not piece.tensor.requires_grad
            piece.tensor.add_(1)
        assert torch.equal(tensor.to_local(), torch.full((1, 4), 3.0))


def test_a_torch_that_moved_its_private_names_is_told_clearly(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()], run_check=False)
    monkeypatch.delattr(torch_placements, "_StridedShard")
    monkeypatch.delitem(sys.modules, "ckpt_core._plan._torch_private", raising=False)
    monkeypatch.delattr("ckpt_core._plan._torch_private", raising=False)
    monkeypatch.setattr("ckpt_core._plan.pieces._mesh_views", {})
    with pytest.raises(CheckpointError, match="_StridedShard") as caught:
        local(tensor)
    assert torch.__version__ in str(caught.value)
    assert caught.value.remedy
