"""Ranks agree on which tensors are tied, also where one of the ranks holds nothing of them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import ScriptRunner

SCRIPT = """
    import json, os, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from ckpt_core._layouts.directory.skeleton import encode_plain

    def main(rank, directory):
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))


        def first_rank_only():
            local = torch.randn(1, 3) if rank == 0 else torch.empty(0, 3)
            return DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((1, 3)), stride=(3, 1))

        one_row = first_rank_only()
        rows = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
        tree = {
            "one": one_row,
            "tied to one": one_row.detach(),
            "parameter of one": torch.nn.Parameter(one_row),
            "another of one row": first_rank_only(),
            "rows": rows,
            "tied to rows": torch.nn.Parameter(rows.detach()),
            "columns": distribute_tensor(torch.randn(4, 3), mesh, [Shard(1)]),
            "copy of rows": rows.clone(),
            "same local tensor": DTensor.from_local(rows.to_local(), mesh, [Replicate()]),
            "local": rows.to_local(),
        }
        skeleton, _ = encode_plain(tree, key="model")
        Path(directory, f"{rank}.json").write_text(json.dumps(skeleton))
        dist.destroy_process_group()

    main(int(os.environ["LOCAL_RANK"]), sys.argv[1])
"""


def test_distributed_tensors(tmp_path: Path, fork_script: ScriptRunner) -> None:
    fork_script(SCRIPT, tmp_path, ranks=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first == {
        "one": "$0",
        "tied to one": "$0",
        "parameter of one": "$0",
        "another of one row": "$1",
        "rows": "$2",
        "tied to rows": "$2",
        "columns": "$3",
        "copy of rows": "$4",
        "same local tensor": "$5",
        "local": "$6",
    }
