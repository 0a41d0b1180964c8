"""Runs that need no person: ``resume="auto"``, ``preempt`` and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accelerate_ckpt import attach
from accelerate_ckpt._state.preemption import PreemptionWatch
from accelerate_ckpt._state.resume import AutoResume
from accelerate_ckpt.config import CheckpointConfig, OptionError
from ckpt_core import CheckpointInfo, RankGroup
from ckpt_core.errors import StateMismatchError
from ckpt_core.preemption import NOT_SAVED, Preemption
from tests.conftest import ACCELERATE
from tests.support.accelerate_ranks import RankResult, Ranks
from tests.support.filling import fill
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server
from tests.support.stores import storage_at

__all__ = ["server_of", "servers"]  # fixtures

TRAINING = """
    import os, signal, time
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(folder, automatic_checkpoint_naming=automatic)
    accelerator = attach(Accelerator(project_config=project), "async", **options)
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    data = torch.utils.data.DataLoader(torch.arange(160.0).reshape(40, 4) / 100, batch_size=2, shuffle=True)
    held_out = torch.utils.data.DataLoader(torch.zeros(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # of epochs, and so not prepared
    accelerator.register_for_checkpointing(schedule)
    model, optimizer, held_out, data = accelerator.prepare(model, optimizer, held_out, data)
    accelerator.load_state()
    point = accelerator.resumed
    tell(resumed=None if point is None else [os.path.basename(point.path), point.step, point.epoch, point.batch])
    step = point.step if point else 0
    evaluated = []
    tell(evaluated=evaluated)
    for epoch in range(point.epoch if point else 0, 2):
        for batch in data:
            if step == before and rank in told:
                os.kill(os.getpid(), number)
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == save_at:
                accelerator.save_state(None if automatic else f"{folder}/checkpoints/step_{step}")
            if step == crash_at:
                os._exit(1)
            if step == at and rank in told:
                if number == 0:
                    open(f"{folder}/notice", "w").close()
                    time.sleep(1)
                else:
                    os.kill(os.getpid(), number)
            for _ in held_out:
                pass  # an evaluation, in which nothing ends
        for index, _ in enumerate(held_out):
            if epoch == in_evaluation and index == 1 and rank in told:
                os.kill(os.getpid(), number)
        evaluated.append(epoch)
        schedule.step()
    accelerator.end_training()
    tell(step=step, weights=accelerator.unwrap_model(model).weight.tolist())
"""


def run(ranks: Ranks, folder: Path, world_size: int = 1, **names: Any) -> list[RankResult]:
    defaults: dict[str, Any] = {"automatic": True, "told": [0], "before": None, "at": None, "number": 15}
    options = {"resume": "auto", "preempt": True, **names.pop("options", {})}
    defaults |= {"in_evaluation": None, "save_at": None, "crash_at": None}
    defaults |= {"folder": str(folder), "options": options}
    folder.mkdir(exist_ok=True)
    return ranks.run(TRAINING, world_size, **{**defaults, **names})


@pytest.mark.extended
@pytest.mark.parametrize("tiered", [False, True])
def test_a_bucket_that_does_not_exist_is_told_before_training(
    ranks: Ranks, tmp_path: Path, server_of: Callable[[str], Server], tiered: bool
) -> None:
    server = server_of("moto")
    missing = f"{server.new_bucket()}-typo/run"
    local = str(tmp_path / "fast")
    places = {"checkpoint_dir": local, "local_dir": local, "upload_to": missing}
    if not tiered:
        places = {"checkpoint_dir": missing}
    (result,) = run(ranks, tmp_path, automatic=False, options={**places, "storage_options": dict(server.options)})
    assert result.error == "CheckpointNotFoundError" and "there is no such bucket" in result.message
    assert "resumed" not in result.told


@pytest.mark.extended_cells("1")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_directory_that_is_a_file_is_told_on_all_ranks_before_training(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    (tmp_path / "file").write_text("precious")
    options = {"checkpoint_dir": str(tmp_path / "file")}
    for result in run(ranks, tmp_path, world_size, automatic=False, options=options):
        assert result.error in ("StorageError", "RankFailedError")  # rank 0's error; the others repeat its message
        assert "Not a directory" in result.message
        assert "resumed" not in result.told


PREPARES = """
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(directory, automatic_checkpoint_naming=directory is not None)
    accelerator = attach(Accelerator(project_config=project), **options)
    model = nn.Linear(4, 1)
    model = accelerator.prepare(model)
    tell(is_ready=True)
    accelerator.prepare(torch.optim.AdamW(model.parameters()))
    tell(trains=True)
"""


@pytest.mark.extended_cells("1")
@pytest.mark.parametrize("world_size", [1, 2])
def test_automatic_names_below_a_file_are_told_before_training_and_not_before_an_evaluation(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    (tmp_path / "file").write_text("precious")
    for result in ranks.run(PREPARES, world_size, directory=str(tmp_path / "file"), options={}):
        assert result.error in ("StorageError", "RankFailedError")
        assert "Not a directory" in result.message
        assert result.told == {"is_ready": True}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_run_whose_last_save_fails_says_so(
    small_filesystem: Path, caplog: pytest.LogCaptureFixture, on_error: str
) -> None:
    options = {"strategy": "async", "on_error": on_error, "preempt": "SIGUSR2"}
    accelerator = attach(Accelerator(cpu=True, project_dir=str(small_filesystem / "run")), **options)
    data = torch.utils.data.DataLoader(torch.zeros(2, 1000))
    model, data = accelerator.prepare(torch.nn.Linear(1000, 100), data)
    with pytest.raises(SystemExit) as end:
        for batch in data:
            accelerator.backward(model(batch).sum())
            fill(small_filesystem)
            signal.raise_signal(signal.SIGUSR2)
    assert end.value.code == 128 + signal.SIGUSR2
    (said,) = [record.getMessage() for record in caplog.records if NOT_SAVED in record.getMessage()]
    assert ("No space left on device" in said) is (on_error == "raise")
    assert not any(record.getMessage().startswith("saved ") for record in caplog.records)


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("{'interval': 'auto'}", "{'just_in_time': True}")
@pytest.mark.parametrize("options", [{"preempt": True}, {"interval": "auto"}, {"just_in_time": True}, {}], ids=str)
def test_a_wrong_bucket_is_told_before_training_where_a_run_saves_unasked(
    ranks: Ranks, tmp_path: Path, server_of: Callable[[str], Server], options: dict[str, Any]
) -> None:
    server = server_of("moto")
    bucket = server.new_bucket()
    for place in (f"{bucket}/run", f"{bucket}-typo/run"):
        more = {"checkpoint_dir": place, "storage_options": dict(server.options), **options}
        (result,) = ranks.run(PREPARES, 1, directory=None, options=more)
        is_refused = bool(options) and "-typo" in place
        assert result.error == ("CheckpointNotFoundError" if is_refused else None)
        assert ("there is no such bucket" in (result.message or "")) == is_refused
        assert result.told.get("trains", False) is not is_refused
    assert storage_at((bucket, dict(server.options))).list(bucket) == []


@pytest.mark.extended_cells("False")
@pytest.mark.parametrize("automatic", [False, True])
def test_a_machine_that_was_replaced_resumes_from_what_was_uploaded(
    ranks: Ranks, tmp_path: Path, server_of: Callable[[str], Server], automatic: bool
) -> None:
    server = server_of("moto")
    local = tmp_path / "checkpoints"
    tiers = {"checkpoint_dir": str(local), "local_dir": str(local), "upload_to": f"{server.new_bucket()}/run"}
    names = {"automatic": automatic, "options": {**tiers, "storage_options": dict(server.options)}}
    (first,) = run(ranks, tmp_path, save_at=3, **names)
    assert first.error is None
    shutil.rmtree(local)
    (second,) = run(ranks, tmp_path, **names)
    assert second.told["resumed"][1] == 3


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("2-[0, 1]-False")
@pytest.mark.parametrize(
    ("world_size", "told", "automatic"), [(1, [0], False), (2, [1], True), (2, [0, 1], False)], ids=str
)
def test_a_preempted_run_resumes_exactly(
    ranks: Ranks, tmp_path: Path, world_size: int, told: list[int], automatic: bool
) -> None:
    whole = run(ranks, tmp_path / "whole", world_size)
    assert [(result.told["resumed"], result.error) for result in whole] == [(None, None)] * world_size
    folder = tmp_path / "run"
    ended = run(ranks, folder, world_size, told=told, at=4, automatic=automatic)
    assert [(result.error, result.message.strip()) for result in ended] == [("SystemExit", "143")] * world_size
    (saved,) = (folder / "checkpoints").iterdir()
    resumed = run(ranks, folder, world_size, automatic=automatic)
    for found, expected in zip(resumed, whole, strict=True):
        name, step, epoch, batch = found.told["resumed"]
        batches = expected.told["step"] // 2  # in an epoch; other ranks learn of the signal some batches later
        assert (name, step) == (saved.name, epoch * batches + batch)
        assert 4 <= step < expected.told["step"]
        assert (found.told["step"], found.told["weights"]) == (expected.told["step"], expected.told["weights"])


@pytest.mark.extended_cells("1-[0]")
@pytest.mark.parametrize(("world_size", "told"), [(1, [0]), (2, [1])], ids=str)
def test_a_resumed_run_is_told_in_its_first_batch_before_it_trains(
    ranks: Ranks, tmp_path: Path, world_size: int, told: list[int]
) -> None:
    run(ranks, tmp_path, world_size, save_at=3, crash_at=3)
    ended = run(ranks, tmp_path, world_size, told=told, before=3)
    assert [(result.error, result.message.strip()) for result in ended] == [("SystemExit", "143")] * world_size
    resumed = run(ranks, tmp_path, world_size)
    assert [result.told["resumed"][1] > 3 for result in resumed] == [True] * world_size


def test_what_a_script_does_at_the_end_of_an_epoch_is_done_though_it_is_told_to_end_before(
    ranks: Ranks, tmp_path: Path
) -> None:
    (whole,) = run(ranks, tmp_path / "whole")
    last_batch = 20
    run(ranks, tmp_path / "run", at=last_batch, automatic=False)
    (resumed,) = run(ranks, tmp_path / "run", automatic=False)
    assert resumed.told["resumed"] == ["checkpoint_20", last_batch, 1, 0]  # saved when the next epoch began
    assert resumed.told["weights"] == whole.told["weights"]


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("2-[0, 1]")
@pytest.mark.parametrize(("world_size", "told"), [(1, [0]), (2, [1]), (2, [0, 1])], ids=str)
def test_an_evaluation_after_an_epoch_is_brought_to_its_end_once(
    ranks: Ranks, tmp_path: Path, world_size: int, told: list[int]
) -> None:
    whole = run(ranks, tmp_path / "whole", world_size)
    ended = run(ranks, tmp_path / "run", world_size, told=told, in_evaluation=0)
    assert [(result.error, result.message.strip()) for result in ended] == [("SystemExit", "143")] * world_size
    resumed = run(ranks, tmp_path / "run", world_size)
    for before, found, expected in zip(ended, resumed, whole, strict=True):
        assert found.told["resumed"][2] == 1  # in the next epoch; at its beginning if all ranks knew by then
        assert (before.told["evaluated"], found.told["evaluated"]) == ([0], [1])
        assert (found.told["step"], found.told["weights"]) == (expected.told["step"], expected.told["weights"])


def test_in_the_last_evaluation_the_run_comes_to_its_end(ranks: Ranks, tmp_path: Path) -> None:
    (result,) = run(ranks, tmp_path, in_evaluation=1)
    assert (result.error, result.told["evaluated"]) == (None, [0, 1])


@pytest.mark.parametrize("options", [{}, {"checkpoint_dir": "run/checkpoints"}], ids=["automatic names", "a directory"])
def test_a_run_stays_where_it_began_though_its_script_changes_its_working_directory(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run").mkdir()
    script = TRAINING.replace(
        "    accelerator.load_state()\n", "    accelerator.load_state()\n    os.chdir(elsewhere)\n"
    )
    script = script.replace("    project = ", "    os.chdir(home)\n    project = ")
    options = {"resume": "auto", "preempt": True, "report": "report.html", **options}
    names = {"home": str(tmp_path), "elsewhere": str(elsewhere), "folder": "run", "automatic": len(options) == 3}
    never = dict.fromkeys(("before", "at", "in_evaluation", "save_at", "crash_at"))
    told = {"told": [0], "number": 15, "options": options, **names}
    for step in (5, 9):
        (result,) = ranks.run(script, 1, **{**never, **told, "at": step})
        assert (result.error, result.message.strip()) == ("SystemExit", "143")
    assert result.told["resumed"][1] == 5
    saved = [path.name.rpartition("_")[0] for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == ["checkpoint"] * 2  # and no crash was recorded
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "report.html", "report.html.jsonl", "run"]
    assert not list(elsewhere.iterdir())


def test_who_has_resumed_nothing_leaves_the_record_of_attempts_alone(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    record = tmp_path / "checkpoints" / ".ckpt-resumes.json"
    record.write_text('{"version": 1, "attempts": {"7@1.0": 1}}')
    ended = run(ranks, tmp_path, 2, told=[0, 1], at=4)
    assert [(result.told["resumed"], result.message.strip()) for result in ended] == [(None, "143")] * 2
    assert record.exists()


def test_a_notice_has_a_status_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    preempt = {"notice": str(tmp_path / "notice"), "look_every": 0.01}
    (result,) = run(ranks, tmp_path, options={"preempt": preempt}, number=0, at=4)
    assert (result.error, result.message.strip()) == ("SystemExit", "75")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]


def test_a_checkpoint_on_which_the_run_crashes_is_stepped_over(ranks: Ranks, tmp_path: Path) -> None:
    for step in (3, 6):
        run(ranks, tmp_path, save_at=step, crash_at=step + 1, automatic=False, options={"resume_attempts": 2})
    names = []
    for _ in range(3):
        (result,) = run(ranks, tmp_path, crash_at=7, automatic=False, options={"resume_attempts": 2})
        names.append(result.told["resumed"][0])
    assert names == ["step_6", "step_6", "step_3"]
    assert (tmp_path / "checkpoints" / "step_6").exists()


def test_a_start_that_loads_again_and_again_is_one_attempt(ranks: Ranks, tmp_path: Path) -> None:
    loading = """
        accelerator = attach(
            Accelerator(), strategy="sync", resume="auto", checkpoint_dir=folder, resume_attempts=attempts
        )
        resumed = []
        for batch_size in (64, 32, 16, 8, 4):  # find_executable_batch_size
            accelerator.free_memory()
            model = nn.Linear(2, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            accelerator.load_state()
            resumed.append(str(accelerator.resumed.path) if accelerator.resumed else None)
        tell(resumed=resumed)
        for step in (1, 2) if resumed[0] is None else ():
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            accelerator.save_state(f"{folder}/step_{step}")
        os._exit(0)
    """
    folder = str(tmp_path / "run")
    ranks.run(loading, 1, folder=folder, attempts=1)
    (result,) = ranks.run(loading, 1, folder=folder, attempts=1)
    assert result.told["resumed"] == [f"{folder}/step_2"] * 5
    (result,) = ranks.run(loading, 1, folder=folder, attempts=1)
    assert result.told["resumed"] == [f"{folder}/step_1"] * 5


def test_attempts_are_counted_in_the_directory_of_their_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    loading = """
        accelerator = attach(Accelerator(project_dir=folder), strategy="sync", resume="auto")
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for root in (folder, other):
            accelerator.project_configuration.set_directories(root)
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            accelerator.save_state(f"{root}/checkpoints/step_1")
            accelerator.load_state()
        os._exit(0)
    """
    roots = [tmp_path / "one", tmp_path / "other"]
    ranks.run(loading, 1, folder=str(roots[0]), other=str(roots[1]))
    assert all((root / "checkpoints" / ".ckpt-resumes.json").exists() for root in roots)


@pytest.mark.parametrize(
    ("ended_by", "is_crash"),
    [(KeyboardInterrupt(), False), (StateMismatchError("another model"), False), (OSError(), True)],
)
def test_another_model_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: BaseException, is_crash: bool
) -> None:
    auto = AutoResume(SimpleNamespace(config=CheckpointConfig(resume="auto"), tiers=None), str(tmp_path))
    auto.begin(CheckpointInfo(str(tmp_path / "step_3"), 1, 0.0, True))
    monkeypatch.setattr("sys.last_value", ended_by, raising=False)
    auto.end()
    assert (tmp_path / ".ckpt-resumes.json").exists() == is_crash


SEVERAL = """
    import gc, os, signal

    def made(name):
        accelerator = attach(Accelerator(project_dir=f"{folder}/{name}"), resume="auto", preempt=True)
        model = nn.Linear(4, 1)
        data = torch.utils.data.DataLoader(torch.zeros(16, 4), batch_size=2)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)

    def train(accelerator, model, optimizer, data, at=None):
        for step, batch in enumerate(data):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)

    first = made("first")
    train(*first)
    second = made("second")
    if is_gone:
        del first
        gc.collect()
    train(*second, at=2)
"""


@pytest.mark.parametrize("is_gone", [False, True], ids=["first is idle", "first is gone"])
def test_each_accelerator_of_a_process_hears_that_the_run_is_to_end(
    ranks: Ranks, tmp_path: Path, is_gone: bool
) -> None:
    (result,) = ranks.run(SEVERAL, 1, folder=str(tmp_path), is_gone=is_gone)
    assert (result.error, result.message.strip()) == ("SystemExit", "143")
    assert [path.name for path in (tmp_path / "second" / "checkpoints").iterdir()] == ["checkpoint_3"]


TOLD = """
    import os, sys, threading, torch
    from accelerate import Accelerator
    from accelerate_ckpt import attach

    number, moment = int(sys.argv[1]), sys.argv[2]
    accelerator = attach(Accelerator(cpu=True, project_dir="run"), resume="auto", preempt=sys.argv[3] or None)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.DataLoader(torch.zeros(16, 4), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    accelerator.load_state()
    if accelerator.resumed and moment == "before":
        os.kill(os.getpid(), number)
        threading.Event().wait(300)  # until the signal ends it
    if accelerator.resumed and moment == "waiting":  # for another rank, where Python runs no handlers
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        torch.distributed.TCPStore("127.0.0.1", 0, is_master=True).wait(["never"])
    for batch in data:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        if accelerator.resumed and moment == "training":
            os.kill(os.getpid(), number)
            threading.Event().wait(300)
        optimizer.zero_grad()
    accelerator.save_state("run/checkpoints/one")
    if accelerator.resumed is None:
        accelerator.end_training()
    print("not told to end")
"""


@pytest.mark.extended_cells("10-training-")
@pytest.mark.parametrize(
    ("number", "moment", "preempt"),
    [
        (signal.SIGTERM, "before", ""),
        (signal.SIGUSR1, "training", ""),
        (signal.SIGINT, "before", ""),
        (signal.SIGUSR1, "waiting", "SIGTERM,SIGUSR1"),
    ],
    ids=str,
)
def test_a_start_that_a_signal_ends_is_no_crash(
    fork_script: Any, tmp_path: Path, number: signal.Signals, moment: str, preempt: str
) -> None:
    _, ended = (fork_script(TOLD, int(number), moment, preempt, modules=ACCELERATE, check=False) for _ in range(2))
    assert (ended.returncode, ended.stdout.count("not told")) == (-number, 0)
    assert "resuming from" in ended.stdout + ended.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["one"]  # no record of a crash


CRASHES_ON_ONE_RANK = """
    import fcntl, os, signal, sys, time, torch
    from accelerate import Accelerator
    from accelerate_ckpt import attach

    preempt, moment = sys.argv[1:]
    alive = open(f"alive.{os.environ['LOCAL_RANK']}", "w")  # locked for as long as this rank lives
    fcntl.flock(alive, fcntl.LOCK_EX)
    accelerator = attach(Accelerator(cpu=True, project_dir="run"), resume="auto", preempt=preempt or None)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.DataLoader(torch.zeros(800, 4), batch_size=1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    accelerator.load_state()
    if accelerator.resumed and moment != "training":
        if accelerator.process_index == 1 and moment == "dies":
            os._exit(0)
        if accelerator.process_index == 1 and moment == "raises":
            raise MemoryError
        if accelerator.process_index == 0:
            fcntl.flock(open("alive.1"), fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGTERM)  # by the launcher, or by whoever takes the machine
        time.sleep(60)
    for step, batch in enumerate(data, 1):
        if accelerator.resumed and step > 3:  # without the other rank
            time.sleep(0.1)
            with accelerator.no_sync(model):
                accelerator.backward(model(batch).pow(2).mean())
            continue
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.resumed is None:
            accelerator.save_state("run/checkpoints/one")
            accelerator.end_training()
            break
        if step == 3 and accelerator.process_index == 1:
            os._exit(0)
        if step == 3:
            fcntl.flock(open("alive.1"), fcntl.LOCK_EX)
            os.kill(os.getpid(), signal.SIGTERM)  # by the launcher
"""


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("dies-", "training-")
@pytest.mark.parametrize("preempt", ["", "SIGTERM"])
@pytest.mark.parametrize("moment", ["dies", "raises", "training"])
def test_the_crash_of_another_rank_counts_though_the_launcher_tells_this_one_to_end(
    fork_script: Any, tmp_path: Path, preempt: str, moment: str
) -> None:
    fork_script(CRASHES_ON_ONE_RANK, preempt, moment, modules=ACCELERATE, ranks=2)
    fork_script(CRASHES_ON_ONE_RANK, preempt, moment, modules=ACCELERATE, ranks=2, check=False)
    record = json.loads((tmp_path / "run" / "checkpoints" / ".ckpt-resumes.json").read_text())
    assert list(record["attempts"].values()) == [1]


def test_ranks_that_are_all_told_to_end_have_not_crashed_though_one_is_gone_first(
    fork_script: Any, tmp_path: Path
) -> None:
    fork_script(CRASHES_ON_ONE_RANK, "", "told", modules=ACCELERATE, ranks=2)
    fork_script(CRASHES_ON_ONE_RANK, "", "told", modules=ACCELERATE, ranks=2, check=False)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["one"]  # no record of a crash


def test_without_the_options_the_process_ends_as_ever(ranks: Ranks, tmp_path: Path) -> None:
    (result,) = run(ranks, tmp_path, at=4, automatic=False, options={"preempt": None})
    assert "step" not in result.told
    assert not (tmp_path / "checkpoints").exists()


def test_seconds_of_a_deadline_count_from_when_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    preemption = Preemption(deadline=3600)
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 7200)  # the clock has been changed
    watch = PreemptionWatch(preemption, RankGroup.alone(), lambda: False)
    watch.close()
    assert watch._watch._notices._preemption.ends_at == preemption.ends_at
    assert not watch._watch._notices._is_over()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "last"}, "resume must be one of 'auto', not 'last'"),
        ({"preempt": "SIGTREM"}, "preempt must be true, or names of signals .*: 'SIGTREM' is not a signal"),
        ({"preempt": "SIGKILL"}, "'SIGKILL' is not a signal that a program can handle"),
        ({"preempt": 3}, "preempt must be true, names of signals"),
        ({"resume_attempts": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CheckpointConfig(**options)


def test_flags_variables_and_files_say_the_same() -> None:
    read = CheckpointConfig.from_sources
    assert read({"preempt": "true"}, variables={}).preempt is True
    assert read({"preempt": "false"}, variables={}).preempt is None
    assert read({}, variables={"ACCELERATE_CKPT_PREEMPT": "SIGTERM,SIGUSR1"}).preempt == "SIGTERM,SIGUSR1"
    assert read({"preempt": '{"deadline": 60}'}, variables={}).preempt == {"deadline": 60}
    assert read({"resume": "auto"}, variables={}).resume == "auto"
    assert signal.SIGTERM == 15
