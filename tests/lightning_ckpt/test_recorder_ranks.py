"""The flight recorder with two ranks of DDP over gloo: what only rank 1 sees is reported on rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LIGHTNING, ScriptRunner
from tests.support.ports import free_port

SCRIPT = """
    import json, os, signal, sys, warnings
    from pathlib import Path
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import Callback
    from lightning_ckpt import ResumableCheckpoint, SyncCheckpointIO

    what, differs, directory = sys.argv[1], sys.argv[2] == "differs", Path(sys.argv[3])

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, index):
            is_other = differs and what == "resumed" and os.environ["LOCAL_RANK"] == "1"
            return torch.full((4,), index / 48) + (1e-3 if is_other else 0) * torch.rand(4)

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(Items(), batch_size=4, shuffle=True)

        def training_step(self, batch, batch_idx):
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    class Dies(Callback):
        def on_train_batch_start(self, trainer, *args):
            if what == "first" and trainer.global_step == 5:
                trainer.strategy.barrier()
                os.kill(os.getpid(), signal.SIGKILL)

    def train():
        pl.seed_everything(1, verbose=False)
        saves = ResumableCheckpoint(directory / "out", every_n_train_steps=3, save_top_k=-1)
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[Dies(), saves],
            plugins=[SyncCheckpointIO(event_log=str(directory / f"events{os.environ['LOCAL_RANK']}"))],
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Model(), ckpt_path="last" if what == "resumed" else None)
        said = [str(w.message) for w in caught if "not exact" in str(w.message)]
        (directory / f"said{trainer.global_rank}").write_text(json.dumps(said))

    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4], NODE_RANK="0", LOCAL_RANK=str(rank))
            os.environ["WORLD_SIZE"] = "2"
            try:
                train()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["same", "differs"])
def test_what_rank_1_alone_sees_is_said_on_rank_0(fork_script: ScriptRunner, tmp_path: Path, case: str) -> None:
    for what, status in (("first", -9), ("resumed", 0)):
        port = free_port()
        done = fork_script(SCRIPT, what, case, tmp_path, port, modules=LIGHTNING)
        assert json.loads(done.stdout.splitlines()[-1]) == [status, status], done.stderr[-3000:]
    compared = [_compared(tmp_path / f"events{rank}") for rank in range(2)]
    said = [json.loads((tmp_path / f"said{rank}").read_text()) for rank in range(2)]
    if case == "same":
        assert [found["differs"] for found in compared] == [[], []]
        assert said == [[], []]
    else:
        assert "data" in compared[1]["differs"] and "data" not in compared[0]["differs"]
        assert any(text.startswith("on rank 1, this resume is not exact: step 4") for text in said[0])


def _compared(path: Path) -> dict[str, Any]:
    (found,) = (event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == "ResumeCompared")
    return dict(found)
