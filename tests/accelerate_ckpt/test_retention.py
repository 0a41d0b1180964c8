"""Retention policies, alongside ``total_limit``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stamina
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from accelerate_ckpt import attach
from accelerate_ckpt._state.retention import Retention
from accelerate_ckpt._state.session import session_of
from accelerate_ckpt.config import CheckpointConfig, OptionError
from ckpt_core import Catalog
from ckpt_core.cli import main
from ckpt_core.policies import AnyOf, KeepAtSteps, KeepBest, KeepEverySteps, KeepEveryTime, KeepLatest
from tests.support.fault_proxy import HttpFault, start_proxy
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server

__all__ = ["server_of", "servers"]  # fixtures

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Training:
    """A training that steps an optimizer, logs and saves."""

    def __init__(self, project_dir: Path, retention: Any, *, strategy: str = "sync", **project: Any) -> None:
        names = ProjectConfiguration(str(project_dir), automatic_checkpoint_naming=bool(project), **project)
        self.accelerator = attach(Accelerator(project_config=names), strategy=strategy, retention=retention)
        self.model = torch.nn.Linear(2, 2)
        self.model, self.optimizer = self.accelerator.prepare(self.model, torch.optim.SGD(self.model.parameters()))

    def step(self, steps: int = 1, **metrics: Any) -> Training:
        for _ in range(steps):
            self.accelerator.backward(self.model(torch.ones(1, 2)).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
        if metrics:
            self.accelerator.log(metrics)
        return self

    def save(self, path: Path | None = None) -> None:
        self.accelerator.save_state(path)


def names(directory: Path) -> list[str]:
    found = [name for name in os.listdir(directory) if not name.endswith(".flight-rank0")]
    return sorted(found, key=lambda name: (len(name), name))


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_the_newest_and_every_so_many_steps(tmp_path: Path, strategy: str) -> None:
    training = Training(tmp_path, AnyOf([KeepLatest(2), KeepEverySteps(4)]), strategy=strategy)
    for step in range(1, 12):
        training.step().save(tmp_path / f"step_{step}")
    training.accelerator.end_training()
    assert names(tmp_path) == ["step_4", "step_8", "step_10", "step_11"]


def test_only_checkpoints_that_are_named_alike_compete(tmp_path: Path) -> None:
    training = Training(tmp_path, "latest=1")
    other = tmp_path / "runs" / "step_1"
    for path in (other, tmp_path / "step_1", tmp_path / "best", tmp_path / "epoch_1", tmp_path / "step_2"):
        training.step().save(path)
    (tmp_path / "step_0").mkdir()  # not a checkpoint
    training.step().save(tmp_path / "step_3")
    assert names(tmp_path) == ["best", "runs", "step_0", "step_3", "epoch_1"]
    assert other.exists()


def test_the_best_by_what_the_script_logs(tmp_path: Path) -> None:
    training = Training(tmp_path, "best=accuracy:max:2")
    for step, accuracy in enumerate([0.5, 0.9, 0.1, 0.7, 0.2, 0.3]):
        training.step(accuracy=torch.tensor(accuracy), note="text").save(tmp_path / f"step_{step}")
    assert names(tmp_path) == ["step_1", "step_3", "step_5"]  # the newest always stays


def test_a_run_that_goes_on_knows_of_the_checkpoints_before(tmp_path: Path) -> None:
    policy = "best=loss,every_steps=10"
    training = Training(tmp_path, policy, iteration=0)
    for loss in (1.0, 3.0, 2.0):
        training.step(6, loss=loss).save()  # after 6, 12 and 18 steps
    folder = tmp_path / "checkpoints"
    # the best, the first after 10 steps, the newest
    assert names(folder) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]

    going_on = Training(tmp_path, policy, iteration=0)
    going_on.accelerator.load_state()
    session = session_of(going_on.accelerator)
    assert session is not None and session.step == 18
    going_on.step(4, loss=9.0).save()  # after 22 steps
    assert names(folder) == ["checkpoint_0", "checkpoint_1", "checkpoint_3"]
    going_on.step(1, loss=0.5).save()  # now the best; checkpoint_3 stays as the first after 20 steps
    assert names(folder) == ["checkpoint_1", "checkpoint_3", "checkpoint_4"]


def test_a_checkpoint_stays_while_the_limit_or_the_policy_wants_it(tmp_path: Path) -> None:
    training = Training(tmp_path, KeepAtSteps([2]), total_limit=2)
    for _ in range(5):
        training.step().save()
    assert names(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_3", "checkpoint_4"]


def test_what_a_run_has_saved_itself_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Retention, path: str) -> None:
        raise AssertionError(f"reading {path} waits until it is durable")

    monkeypatch.setattr(Retention, "_read", refuse)
    training = Training(tmp_path, "latest=1", strategy="async")
    for step in range(3):
        training.step().save(tmp_path / f"step_{step}")
    training.accelerator.end_training()
    assert names(tmp_path) == ["step_2"]


def test_a_neighbour_that_cannot_be_read_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Training(tmp_path, "latest=1")
    first.step().save(tmp_path / "step_1")
    (tmp_path / "step_1" / "manifest.json").write_text("{")
    second = Training(tmp_path, "latest=1")
    for step in (2, 3):
        second.step().save(tmp_path / f"step_{step}")
    assert names(tmp_path) == ["step_1", "step_3"]
    assert [record.message for record in caplog.records if "cannot be read" in record.message] != []


def test_a_run_that_only_warns_goes_on_without_its_store(
    server_of: Callable[[str], Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = server_of("moto")
    stamina.set_testing(True, attempts=2, cap=True)
    try:
        with start_proxy(server.endpoint) as proxy:
            options = {**server.options, "endpoint_url": proxy.endpoint, "retry_config": {"max_retries": 0}}
            root = f"{server.new_bucket()}/run"
            project = ProjectConfiguration(root, automatic_checkpoint_naming=True, total_limit=2)
            accelerator = Accelerator(project_config=project)
            attach(accelerator, "async", on_error="warn", storage_options=options)
            accelerator.prepare(torch.nn.Linear(1000, 100))
            for number in range(5):
                if number == 3:
                    session_of(accelerator).checkpointer.drain()
                    proxy.plan(HttpFault("503", 1, for_good=True))
                accelerator.save_state()
            accelerator.end_training()
    finally:
        stamina.set_testing(False)
    found = Catalog(f"{root}/checkpoints", suffix="", storage_options=dict(server.options)).paths()
    assert sorted(map(os.path.basename, found)) == ["checkpoint_1", "checkpoint_2"]
    assert caplog.text.count("nothing is deleted after this save") == 2


def test_nothing_goes_when_its_successor_was_not_saved(small_filesystem: Path) -> None:
    training = Training(small_filesystem, "latest=1")
    training.step().save(small_filesystem / "step_1")
    large = torch.nn.Linear(2200, 1000)  # 8.8 MB, but only 8.4 fit
    training.accelerator.prepare(large)
    with pytest.raises(OSError, match="No space left"):
        training.step().save(small_filesystem / "step_2")
    assert names(small_filesystem) == ["step_1"]


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize(("retention", "limit"), [("latest=1", None), (None, 1), ("latest=1", 2)])
def test_what_is_pinned_stays(tmp_path: Path, retention: Any, limit: int | None, strategy: str) -> None:
    training = Training(tmp_path, retention, strategy=strategy, total_limit=limit)
    training.step(loss=0.25).save()
    training.accelerator.end_training()
    folder = tmp_path / "checkpoints"
    assert main(["keep", str(folder / "checkpoint_0")]) == 0
    for _ in range(4):
        training.step().save()
    training.accelerator.end_training()
    left = [name for name in names(folder) if name.startswith("checkpoint")]
    assert left == ["checkpoint_0", *(f"checkpoint_{number}" for number in range(5 - (limit or 1), 5))]


def test_checkpoints_tell_what_the_script_has_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(tmp_path, None)
    for step, loss in enumerate([0.5, 0.25, 1.0]):
        training.step(loss=loss, device=torch.ones(1, device="meta")).save(tmp_path / f"step_{step}")
    assert main(["ls", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["metrics"] for entry in listed] == [{"loss": 1.0}, {"loss": 0.25}, {"loss": 0.5}]
    assert main(["prune", str(tmp_path), "--keep", "best=loss", "--yes"]) == 0
    assert names(tmp_path) == ["step_1", "step_2"]


# ---- how it is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        ("latest=2", KeepLatest(2)),
        ("every_hours=0.5", KeepEveryTime(0.5)),
        ("at_steps=10+20", KeepAtSteps([10, 20])),
        ("best=eval/loss", KeepBest("eval/loss")),
        ("best=loss:3", KeepBest("loss", 3)),
        ("latest=1, best=loss:min:3", AnyOf([KeepLatest(1), KeepBest("loss", 3, "min")])),
        ('{"class_path": "ckpt_core.policies.KeepLatest", "init_args": {"count": 3}}', KeepLatest(3)),
    ],
)
def test_rules_in_words(tmp_path: Path, written: str, policy: Any) -> None:
    for options in (
        CheckpointConfig.from_sources({"retention": written}, variables={}),
        CheckpointConfig.from_sources(variables={"ACCELERATE_CKPT_RETENTION": written}),
    ):
        session = session_of(attach(Accelerator(), **vars(options)))
        assert session is not None and session.retention is not None
        assert session.retention._history.policy == policy


def test_a_policy_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints.yaml"
    file.write_text(
        """
retention:
  class_path: ckpt_core.policies.AnyOf
  init_args:
    policies:
      - class_path: ckpt_core.policies.KeepLatest
        init_args: {count: 2}
      - class_path: ckpt_core.policies.KeepBest
        init_args: {metric: loss, mode: max}
"""
    )
    config = CheckpointConfig.from_sources({"config": str(file)}, variables={})
    session = session_of(attach(Accelerator(), **vars(config)))
    assert session is not None and session.retention is not None
    assert session.retention._history.policy == AnyOf([KeepLatest(2), KeepBest("loss", mode="max")])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("newest=2", "--retention: retention has no rule 'newest'; rules are latest, best"),
        ("latest", "needs a whole number of at least 1 for latest, not ''"),
        ("latest=0", "needs a whole number of at least 1 for latest"),
        ("every_hours=-1", "a number of hours above 0 for every_hours, not '-1'"),
        ("at_steps=1-2", r"steps with \+ between them"),
        ("best=", "METRIC, METRIC:max"),
        ("best=loss:lowest", "METRIC, METRIC:max"),
        ("[1]", "has no rule"),
        ('{"class_pth": "x"}', "must be a policy such as"),
    ],
)
def test_rules_that_cannot_be_are_named(written: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        CheckpointConfig.from_sources({"retention": written}, variables={})


def test_a_class_is_no_policy() -> None:
    with pytest.raises(OptionError, match=r"retention must be a policy such as ckpt_core.policies.KeepLatest\(2\)"):
        CheckpointConfig(retention=KeepLatest)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("ckpt_core.policies.KeepNewest", "retention: ckpt_core.policies.KeepNewest cannot be made"),
        ("no.such.module", "No module named 'no'"),
        ("collections.OrderedDict", "is not a policy"),
    ],
)
def test_a_class_that_is_no_policy_is_named(path: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        attach(Accelerator(), retention={"class_path": path})


def test_the_flag_of_the_launcher(run_script: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "accelerator.prepare(torch.nn.Linear(2, 2))\n"
        f"for step in range(4):\n    accelerator.save_state(f'{tmp_path}/step_{{step}}')\n"
    )
    run_script(
        "import sys\nfrom accelerate_ckpt.launcher import main\n"
        f"main(['--strategy', 'sync', '--retention', 'latest=2', {str(script)!r}])"
    )
    assert names(tmp_path) == ["step_2", "step_3", "train.py"]
