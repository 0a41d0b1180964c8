"""The sharded plugin without our callback: in a Trainer, in spawned ranks, and through LightningCLI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LIGHTNING, ScriptRunner

SCRIPT = """
import importlib, sys, torch
package, directory, start = sys.argv[1:4]
pl = importlib.import_module(package)
from lightning_ckpt import ShardedCheckpointIO

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 257)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

def trainer(steps):
    return pl.Trainer(
        accelerator="cpu", devices=2, strategy=start, max_steps=steps, plugins=[ShardedCheckpointIO()], logger=False,
        callbacks=[importlib.import_module(f"{package}.callbacks").ModelCheckpoint(directory, every_n_train_steps=2)],
        enable_progress_bar=False, enable_model_summary=False,
    )

if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.ones(16, 64), batch_size=2)
    trainer(2).fit(Model(), data)
    trainer(4).fit(Model(), data, ckpt_path=f"{directory}/epoch=0-step=2.ckpt")
"""


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_plugin_is_enough(fork_script: ScriptRunner, tmp_path: Path, package: str) -> None:
    directory = tmp_path / "checkpoints"
    fork_script(SCRIPT, package, directory, "ddp_fork", modules=LIGHTNING)
    saved = directory / "epoch=0-step=4.ckpt"
    assert (saved / "manifest.json").exists()
    assert len(list(saved.glob("optimizer-*-of-00002.safetensors"))) == 2, "both ranks have written"


@pytest.mark.slow
def test_the_plugin_is_enough_in_spawned_processes(run_script: ScriptRunner, tmp_path: Path) -> None:
    directory, script = tmp_path / "checkpoints", tmp_path / "script.py"
    script.write_text(SCRIPT)
    run_script(script, "lightning.pytorch", directory, "ddp_spawn")
    saved = directory / "epoch=0-step=4.ckpt"
    assert len(list(saved.glob("optimizer-*-of-00002.safetensors"))) == 2, "both ranks have written"


def test_strategies_that_cannot_be_routed_say_so() -> None:
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    from ckpt_core.errors import CheckpointError
    from lightning_ckpt import ShardedCheckpointIO
    from lightning_ckpt._routing.trainer import route

    class DeepSpeedStrategy(DDPStrategy):
        """A strategy with the name of DeepSpeed's, and nothing else of it."""

    class Trainer:
        def __init__(self, strategy: object) -> None:
            self.strategy = strategy

    with pytest.raises(CheckpointError, match="does not work with DeepSpeedStrategy") as caught:
        route(Trainer(DeepSpeedStrategy(checkpoint_io=ShardedCheckpointIO())))
    assert "leave the plugin out" in str(caught.value)
    for strategy, option in (
        (FSDPStrategy(state_dict_type="full"), "state_dict_type='sharded'"),
        (ModelParallelStrategy(save_distributed_checkpoint=False), "save_distributed_checkpoint=True"),
    ):
        strategy.checkpoint_io = ShardedCheckpointIO()
        with pytest.raises(CheckpointError) as caught:
            route(Trainer(strategy))
        assert option in str(caught.value)


def test_in_several_processes_it_must_be_routed(fork_script: ScriptRunner, tmp_path: Path) -> None:
    done = fork_script(
        """
        import sys, torch
        from ckpt_core.errors import CheckpointError
        from lightning_ckpt import ShardedCheckpointIO
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        torch.distributed.get_world_size = lambda *args: 2
        try:
            ShardedCheckpointIO().save_checkpoint({}, sys.argv[1])
        except CheckpointError as error:
            print(error)
        """,
        tmp_path / "x.ckpt",
        modules=LIGHTNING,
    )
    assert "saves on all ranks together" in done.stdout


@pytest.mark.extended
def test_configurations_run(fork_script: ScriptRunner, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    main, config = root / "examples" / "lightning_cli" / "main.py", root / "configs" / "lightning" / "sharded.yaml"
    strategy = tmp_path / "strategy.yaml"
    strategy.write_text(
        "trainer:\n  plugins: null\n  strategy:\n    class_path: lightning.pytorch.strategies.DDPStrategy\n    init_args:\n"
        "      checkpoint_io:\n        class_path: lightning_ckpt.ShardedCheckpointIO\n"
    )
    steps = ["--trainer.max_steps", "100"]
    given = {"modules": LIGHTNING, "ranks": 2, "timeout": 300}
    fork_script(main, "fit", "--config", config, *steps, **given)
    (saved,) = (tmp_path / "checkpoints").glob("epoch*.ckpt")
    assert (saved / "manifest.json").exists()
    more = ["--trainer.max_steps", "150", "--ckpt_path", "last"]
    fork_script(main, "fit", "--config", config, "--config", strategy, *more, **given)
    (saved,) = [path for path in (tmp_path / "checkpoints").glob("epoch*.ckpt") if "step=150" in path.name]
    assert (saved / "manifest.json").exists()
