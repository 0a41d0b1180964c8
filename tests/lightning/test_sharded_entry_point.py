"""The plugin by configuration alone: through the entry point of the installed package, and through LightningCLI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LIGHTNING, ScriptRunner

# The metadata of an installed package, and nothing else of it.
ENTRY_POINTS = """
[lightning.pytorch.callbacks_factory]
ckpt-plugins = lightning_ckpt._entry_point:callbacks
[pytorch_lightning.callbacks_factory]
ckpt-plugins = lightning_ckpt._entry_point:callbacks
"""

SCRIPT = """
import importlib, sys, torch, logging
package, directory = sys.argv[1:]
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
        accelerator="cpu", devices=2, strategy="ddp_fork", max_steps=steps, plugins=[ShardedCheckpointIO()], logger=False,
        callbacks=[importlib.import_module(f"{package}.callbacks").ModelCheckpoint(directory, every_n_train_steps=2)],
        enable_progress_bar=False, enable_model_summary=False,
    )

data = torch.utils.data.DataLoader(torch.ones(16, 64), batch_size=2)
trainer(2).fit(Model(), data)
trainer(4).fit(Model(), data, ckpt_path=f"{directory}/epoch=0-step=2.ckpt")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with the metadata, as pip leaves it beside the package."""
    metadata = tmp_path / "site" / "ckpt_plugins_under_test-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ckpt-plugins-under-test\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return metadata.parent


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_installed_package_is_enough(fork_script: ScriptRunner, tmp_path: Path, site: Path, package: str) -> None:
    directory = tmp_path / "checkpoints"
    path = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{site}"}
    fork_script(SCRIPT, package, directory, modules=LIGHTNING, env=path, timeout=300)
    saved = directory / "epoch=0-step=4.ckpt"
    assert (saved / "manifest.json").exists()
    assert len(list(saved.glob("optimizer-*-of-00002.safetensors"))) == 2, "both ranks have written"


def test_not_used_it_imports_nothing(run_script: ScriptRunner) -> None:
    done = run_script(
        """
        import sys
        import lightning.pytorch
        before = set(sys.modules)
        from lightning_ckpt import _entry_point
        (callback,) = _entry_point.callbacks()
        callback.setup(None, None, "fit")
        assert isinstance(callback, lightning.pytorch.Callback)
        print(sorted(set(sys.modules) - before))
        """
    )
    assert done.stdout.strip() == "['lightning_ckpt', 'lightning_ckpt._entry_point']"


def test_strategies_that_cannot_be_routed_say_so() -> None:
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    from ckpt_core.errors import CheckpointError
    from lightning_ckpt import ShardedCheckpointIO
    from lightning_ckpt._sharded_routing import route

    class DeepSpeedStrategy(DDPStrategy):
        """As far as its name says."""

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
    assert "must be called on all ranks" in done.stdout


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
