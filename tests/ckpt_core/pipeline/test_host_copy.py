"""Copies of host memory: every byte arrives, and nothing is written before that."""

from __future__ import annotations

import collections
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer
from ckpt_core._layouts.directory.safetensors_file import byte_pieces
from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core._layouts.torch_file.archive import StateLayout
from ckpt_core._pipeline import host_copy
from ckpt_core._pipeline.buffer_pool import BufferPool
from ckpt_core._pipeline.host_copy import HOST_PIECE, HostCopy
from ckpt_core._pipeline.staging import Snapshot
from ckpt_core.buffers import move_of
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage

MIB = 2**20


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_arrives_whatever_its_size_and_place(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes = [0, 1, 15, 16, 4096, 65_535, 65_536, 500_000, 524_288, 524_289, 3 * MIB, HOST_PIECE]
    flat = [
        torch.randint(256, (size + 3,), dtype=torch.uint8)[offset : size + offset]
        for size in sizes
        for offset in (0, 3)
    ]
    grids = [torch.randn(300, 70).t(), torch.randn(900, 700).t(), torch.randn(40, dtype=torch.complex64).conj()]
    expected = [*flat, *(grid.clone().resolve_conj().contiguous().view(-1).view(torch.uint8) for grid in grids)]
    memory = torch.zeros(sum(tensor.numel() + 64 for tensor in expected), dtype=torch.uint8)
    pieces, places, begin = [], [], 0
    for index, tensor in enumerate(expected):
        end = begin + tensor.numel()
        places.append(memory[begin:end])
        if index < len(flat):
            pieces.append((end, places[-1], tensor))
        else:
            source = grids[index - len(flat)]
            pieces += [(end, *piece) for piece in byte_pieces(source, 0, tensor.numel(), places[-1])]
        begin = -(-end // 16) * 16 + 16
    copy = HostCopy(move_of(target, source) for _, target, source in pieces)
    copy.hand_over()
    copy.wait_until(begin)
    for place, tensor in zip(places, expected, strict=True):
        assert torch.equal(place, tensor)
    assert int(memory.long().sum()) == sum(int(tensor.long().sum()) for tensor in expected)  # and nothing next to them


def test_what_is_copied_stays_where_it_is_until_then_and_no_longer() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    is_held = weakref.ref(source)
    copy = HostCopy([move_of(target, source)])
    del source
    assert is_held() is not None
    copy.hand_over()
    assert is_held() is None
    assert torch.equal(target, torch.arange(100, dtype=torch.uint8))


def test_a_copy_that_is_given_up_is_not_waited_for() -> None:
    copy = HostCopy([(torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8))])

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        copy.hand_over(fail)
    copy.settle()
    assert not copy.wait()
    with pytest.raises(ImageAbandonedError):
        copy.wait_until(4)


@pytest.mark.parametrize(("size", "count"), [(20_000, 100), (3 * MIB, 2)], ids=["many small", "few large"])
def test_no_file_is_begun_before_the_state_is_copied(monkeypatch: pytest.MonkeyPatch, size: int, count: int) -> None:
    snapshot = Snapshot("a.ckpt", BufferPool(1))
    snapshot.take(StateLayout([torch.randn(size) for _ in range(count)]))
    has_begun = []

    def copy(*arguments: Any, **options: Any) -> None:  # with few large tensors, pickling runs alongside this copy
        run_parallel(*arguments, **options)
        has_begun.append(snapshot._taken.is_set())

    monkeypatch.setattr(host_copy, "run_parallel", copy)
    snapshot.finish()
    assert has_begun == [False]
    snapshot.wait_begun()
    snapshot.seal()
    snapshot.release()


def test_nothing_is_written_while_the_state_is_copied(tmp_path: Path) -> None:
    is_written = threading.Event()

    class Slow:  # slow to pickle, and the copy has not ended by then
        def __reduce__(self) -> tuple[Any, ...]:
            assert not is_written.wait(0.3)
            return collections.OrderedDict, ()

    written = Fault(lambda operation: operation.name == "write_at" and (is_written.set() or False))
    with Checkpointer(storage=FaultyStorage(LocalStorage(), [written])) as checkpointer:
        checkpointer.save({"w": torch.ones(MIB), "slow": Slow()}, tmp_path / "a")
        checkpointer.wait()
        assert is_written.is_set()
        assert torch.equal(checkpointer.load(tmp_path / "a")["w"], torch.ones(MIB))
