"""Loops of one's own that are told to end: all ranks after the same step, and the status with which they end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.ending import End, EndWatch

LOOP = """
    import os, pathlib, signal, sys, time
    import torch.distributed as dist
    from ckpt_core import RankGroup
    from ckpt_core.ending import EndWatch

    folder, told = pathlib.Path(sys.argv[1]), [int(rank) for rank in sys.argv[2]]
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    rank = dist.get_rank()

    def broadcast(value):
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    watch = EndWatch(True, RankGroup.connect(rank, dist.get_world_size(), broadcast))
    for step in range(1, 10_000):
        time.sleep(0.002 * rank)
        dist.barrier()  # the gradients
        if step == 20 and rank in told:
            os.kill(os.getpid(), signal.SIGTERM)
        end = watch.due()
        if end is not None:
            (folder / f"end.{rank}").write_text(f"{step} {end.reason} {end.status}")
            dist.barrier()
            watch.close()
            break
"""


@pytest.mark.parametrize("told", ["1", "01"])
def test_all_ranks_end_after_the_same_step_whoever_is_told(told: str, fork_script: Any, tmp_path: Path) -> None:
    fork_script(LOOP, tmp_path, told, ranks=2)
    first, second = ((tmp_path / f"end.{rank}").read_text() for rank in range(2))
    assert first == second
    step, reason, status = first.split()
    assert 20 <= int(step) < 9_999
    assert (reason, status) == ("SIGTERM", "143")


def test_a_single_process_ends_at_the_next_step_and_its_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    watch = EndWatch("SIGUSR2")
    try:
        assert watch.due() is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert watch.due() == End("SIGUSR2", 128 + signal.SIGUSR2)
        assert watch.due() is None
    finally:
        watch.close()
    assert signal.getsignal(signal.SIGUSR2) == before
