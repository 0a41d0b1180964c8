"""Trains with torchft's DiLoCo, one process for each replica; saves at every boundary, and resumes from the newest.

Arguments: directory, replicas, fragments, windows, after which checkpoint all processes are killed (0: never).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt_async.local_updates import DiLoCoState, StreamCursor, TorchftLoop, WorkerState
from ckpt_core import Catalog, CheckpointError, DirectoryCheckpointer, RankGroup
from ckpt_core.tree import tensors

STEPS = 4
LIMIT = timedelta(seconds=120)


def replica(
    rank: int, replicas: int, fragments: int, windows: int, kill: int, root: str, lighthouse: str, port: int
) -> None:
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    torch.set_num_threads(1)
    together = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts: list[nn.Module] = [model] if fragments == 1 else list(model)
    outers = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=replicas,
        use_async_quorum=False,
        load_state_dict=None,
        state_dict=None,
        replica_id=f"replica-{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        init_sync=False,
    )
    torch.manual_seed(100 + rank)

    numbers = itertools.count()

    def broadcast(value: Any) -> Any:
        key = f"broadcast {next(numbers)}"
        if rank == 0:
            together.set(key, json.dumps(value))
        return json.loads(together.get(key))

    cursor = StreamCursor(4, worker=rank, workers=replicas)
    found: dict[str, Any] = {"resumed": None, "in_window": None}
    ranks = RankGroup.connect(rank, replicas, broadcast)
    with (
        DiLoCo(manager, parts, inner, outers, sync_every=STEPS * fragments, pin_memory=False) as diloco,
        DirectoryCheckpointer(ranks=ranks) as checkpointer,
    ):
        loop = TorchftLoop(diloco, manager)
        state = DiLoCoState(loop, WorkerState(cursor, inner=inner))
        newest, number = Catalog(root).newest_verified(), 0
        if newest is not None:
            with checkpointer.load(newest.path) as opened:
                state.load(opened)
                number = found["resumed"] = opened.metadata["number"]
        while number < windows:
            for update in cursor.take(STEPS):
                inputs = torch.randn(4, 8)
                inner.zero_grad()
                (model(inputs) - inputs.sum(1, keepdim=True) * update.seq).pow(2).mean().backward()
                inner.step()
                if not loop.at_boundary:
                    try:
                        state.parts()
                    except CheckpointError as error:
                        found["in_window"] = str(error)
            assert loop.at_boundary
            number += 1
            checkpointer.save(state.parts(), f"{root}/{number:06d}.ckpt", metadata={"number": number})
            if number == kill:
                while rank:
                    time.sleep(1)
                checkpointer.drain()
                os.killpg(0, signal.SIGKILL)
        digest = hashlib.sha256()
        whole = [loop.global_parameters(), loop.own_parameters(), loop.outer_state(), inner.state_dict()]
        for name, tensor in tensors([*whole, torch.get_rng_state()]):
            digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        found["digest"] = digest.hexdigest()
        found["step"] = manager.current_step()
    Path(f"{root}-{rank}.json").write_text(json.dumps(found))
    manager.shutdown(wait=False)
    os._exit(0)  # threads of torchft may wait for a lighthouse


def main() -> None:
    from torchft.coordination import LighthouseServer

    root, (replicas, fragments, windows, kill) = sys.argv[1], map(int, sys.argv[2:6])
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=replicas, join_timeout_ms=1000)
    together = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = lighthouse.address()
    spawn = multiprocessing.get_context("spawn")
    arguments = [(rank, replicas, fragments, windows, kill, root, address, together.port) for rank in range(replicas)]
    processes = [spawn.Process(target=replica, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    os._exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
