"""``save_state`` and ``load_state`` on several real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.accelerate_ranks import Ranks

PREPARED = """
    from tests.accelerate_ckpt.training import Counter, Run
    accelerator = attach(Accelerator(gradient_accumulation_steps=accumulation), strategy)
    run = Run(accelerator, seed=seed)
    counter = Counter(100 + rank)
    accelerator.register_for_checkpointing(counter)
    torch.manual_seed(50 + rank)
"""
# What each rank has of its own; tensors as lists, because it is sent as JSON.
OWN = """
    tell(
        own=[counter.count, torch.rand(2).tolist(), accelerator.step],
        buffers=[buffer.tolist() for buffer in accelerator._models[0].buffers()],
        weights=[p.tolist() for p in run.model.parameters()],
        gradients=[None if p.grad is None else p.grad.tolist() for p in run.model.parameters()],
        losses=run.losses,
    )
"""


@pytest.mark.extended_cells("sync-1")
@pytest.mark.parametrize(("strategy", "accumulation"), [("sync", 1), ("async", 4), ("sharded", 1)])
def test_two_ranks_go_on_as_if_they_had_not_stopped(
    ranks: Ranks, tmp_path: Path, strategy: str, accumulation: int
) -> None:
    names: dict[str, Any] = {"strategy": strategy, "accumulation": accumulation, "saved": str(tmp_path / "saved")}
    cut = ranks.run(
        PREPARED
        + "    run.train(12, save_after=7, path=saved)\n    tell(buffers_then=run.buffers_at_save)\n"
        + OWN
        + "    accelerator.end_training()\n",
        2,
        seed=0,
        **names,
    )
    resumed = ranks.run(
        PREPARED
        + "    counter.count = 0\n    accelerator.load_state(saved)\n    tell(buffers_then=run.buffers())\n    run.train(5)\n"
        + OWN
        + "    accelerator.end_training()\n",
        2,
        seed=1,
        **names,
    )
    for rank in range(2):
        assert cut[rank].error is None and resumed[rank].error is None
        assert resumed[rank].told["losses"] == cut[rank].told["losses"][7:]
        for name in ("own", "weights", "buffers", "buffers_then", "gradients"):
            assert resumed[rank].told[name] == cut[rank].told[name], name
    assert cut[0].told["own"] != cut[1].told["own"]
    assert cut[0].told["buffers_then"] != cut[1].told["buffers_then"]


@pytest.mark.parametrize("strategy", ["async", "sharded"])
def test_the_hooks_of_rank_zero_decide(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    body = """
        from tests.accelerate_ckpt.training import model_of
        accelerator = attach(Accelerator(), strategy)
        first, second = accelerator.prepare(model_of(1), model_of(2))

        def save(models, weights, directory):
            Path(directory, f"rank-{rank}.txt").write_text(str(len(weights)))
            Path(directory, "config.json").write_text(f"of rank {rank}")
            if accelerator.is_main_process:
                weights.pop()

        accelerator.register_save_state_pre_hook(save)
        accelerator.save_state(saved)
        accelerator.end_training()
        tell(files=sorted(path.name for path in Path(saved).iterdir()))
    """
    results = ranks.run(body, 2, saved=str(tmp_path / "saved"), strategy=strategy)
    assert [result.error for result in results] == [None, None]
    files = results[0].told["files"]
    assert {name.split("-")[0].split(".")[0] for name in files if name.startswith("model")} == {"model"}
    assert (tmp_path / "saved" / "config.json").read_text() == "of rank 0"
    assert {"rank-0.txt", "rank-1.txt"} <= set(files)


@pytest.mark.each_value
@pytest.mark.parametrize(("caller", "strategy"), [(0, "sync"), (0, "async"), (1, "sync"), (1, "async")])
def test_a_save_on_one_rank_alone_is_an_error_that_says_what_to_do(
    ranks: Ranks, tmp_path: Path, caller: int, strategy: str
) -> None:
    body = """
        import time
        from tests.support.ranks import answer_patiently
        answer_patiently()
        over = Path(saved + "-over")
        has_failed = lambda event: type(event).__name__ == "SaveFailed" and over.touch()
        accelerator = attach(Accelerator(), strategy, commit_timeout=2, listeners=[has_failed])
        accelerator.prepare(nn.Linear(2, 2))
        if rank == caller:
            started = time.monotonic()
            try:
                accelerator.save_state(saved)
                accelerator.end_training()
            finally:
                tell(seconds=time.monotonic() - started)
                over.touch()
        else:
            while not over.exists():  # the store is on rank 0
                time.sleep(0.01)
    """
    results = ranks.run(body, 2, saved=str(tmp_path / "saved"), caller=caller, strategy=strategy)
    assert results[caller].error == "RankFailedError"
    if (caller, strategy) == (0, "async"):  # detected in the background
        assert "rank 1 did not begin the save" in results[0].message
        assert "call save on all ranks" in results[0].message
    else:
        assert f"called on rank {caller}, and not on rank {1 - caller} within 2 s" in results[caller].message
        assert "not under a condition such as `if is_main_process`" in results[caller].message
    assert results[caller].told["seconds"] >= 2
    assert not (tmp_path / "saved").exists()


LARGE = """
    accelerator = attach(Accelerator(), "async", **options)
    model = nn.Linear(300, 300)  # more than what is waited for
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters()))

    def train(steps):
        for _ in range(steps):
            optimizer.step()
"""


@pytest.mark.parametrize("hooks", [False, True])
def test_rank_zero_does_not_wait_for_the_others_in_an_asynchronous_save(
    ranks: Ranks, tmp_path: Path, hooks: bool
) -> None:
    body = (
        LARGE
        + """
    import time
    accelerator.prepare(model)
    if hooks:
        accelerator.register_save_state_pre_hook(lambda models, weights, path: Path(path, "hook").write_text("x"))
    while rank == 1 and not Path(saved + "-returned").exists():
        time.sleep(0.01)
    accelerator.save_state(saved)
    if rank == 0:
        Path(saved + "-returned").touch()
    accelerator.end_training()
    tell(files=sorted(path.name for path in Path(saved).iterdir()))
    """
    )
    results = ranks.run(body, 2, saved=str(tmp_path / "saved"), hooks=hooks, options={"commit_timeout": 20})
    assert [(result.error, result.ended) for result in results] == [(None, True), (None, True)], results[0].message
    assert {"manifest.json", "model.safetensors"} <= set(results[0].told["files"])
    assert ("hook" in results[0].told["files"]) == hooks


@pytest.mark.parametrize("missed", [0, 1])
def test_a_rank_that_has_missed_a_save_is_not_mixed_into_it(ranks: Ranks, tmp_path: Path, missed: int) -> None:
    body = (
        LARGE
        + """
    import time
    if rank != missed:
        try:
            accelerator.save_state(saved + "-1")
        except Exception as error:
            tell(alone=type(error).__name__)
    train(1)
    accelerator.save_state(saved + "-2")
    if rank == 1:
        time.sleep(4)
    accelerator.end_training()
    """
    )
    results = ranks.run(body, 2, saved=str(tmp_path / "saved"), missed=missed, options={"commit_timeout": 20})
    assert "RankFailedError" in {results[1 - missed].error, results[1 - missed].told.get("alone")}
    if missed == 1:
        assert results[1].error == "RankFailedError"
        assert "rank 1 saves step 1, but rank 0 step 0" in results[1].message
    assert list(tmp_path.glob("*/manifest.json")) == []


def test_ranks_may_differ_in_steps_where_accelerate_lets_them(ranks: Ranks, tmp_path: Path) -> None:
    body = (
        """
    from tests.support.ranks import answer_patiently
    answer_patiently()
"""
        + LARGE
        + """
    if joined:
        with accelerator.join_uneven_inputs([]):
            train(1 + rank)
    else:
        accelerator.even_batches = even
        accelerator = attach(accelerator, "sync", **options)  # a new session
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters()))
        train(1 + rank)
    accelerator.save_state(saved)
    accelerator.end_training()
    """
    )
    options = {"commit_timeout": 20}
    for joined, even in ((True, True), (False, False)):
        saved = tmp_path / f"{joined}"
        results = ranks.run(body, 2, saved=str(saved), joined=joined, even=even, options=options)
        assert [result.error for result in results] == [None, None], [result.message for result in results]
        assert (saved / "manifest.json").exists()
    results = ranks.run(
        body, 2, saved=str(tmp_path / "refused"), joined=False, even=True, options={"commit_timeout": 2}
    )
    assert [result.error for result in results] == ["RankFailedError", "RankFailedError"]
    assert "rank 1 saves step 2, but rank 0 step 1" in results[1].message
    assert not (tmp_path / "refused").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_failure_in_the_background_surfaces_on_every_rank_at_the_same_step(
    ranks: Ranks, small_filesystem: Path, on_error: str
) -> None:
    body = """
        import time
        accelerator = attach(Accelerator(), "async", on_error=on_error)
        model = nn.Linear(2200, 1000)  # 8.8 MB, and there are 8.4
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))

        def step():
            accelerator.backward(model(torch.ones(1, 2200)).sum())
            optimizer.step()
            optimizer.zero_grad()

        step()
        accelerator.save_state(saved)
        tell(returned=True)
        for done in range(steps):
            step()
            tell(steps=done)
            time.sleep(0.05)
        accelerator.end_training()
    """
    steps = 40 if on_error == "warn" else 800  # ended by the failure, which may take a while on a busy machine
    results = ranks.run(body, 2, saved=str(small_filesystem / "saved"), on_error=on_error, steps=steps)
    assert all(result.told["returned"] for result in results)
    if on_error == "warn":
        assert [(result.error, result.told["steps"]) for result in results] == [(None, 39), (None, 39)]
        return
    assert [result.error for result in results] == ["StorageError", "StorageError"]
    assert "No space left" in results[0].message and "No space left" in results[1].message
    assert results[0].told["steps"] == results[1].told["steps"] < steps - 1


def test_a_save_in_the_background_is_there_after_the_training_has_ended(ranks: Ranks, tmp_path: Path) -> None:
    body = """
        accelerator = attach(Accelerator(), "async")
        accelerator.prepare(nn.Linear(1000, 1000))
        accelerator.save_state(saved)
        if ending == "end_training":
            accelerator.end_training()
            tell(there=Path(saved).is_dir())
        elif ending == "raise":
            raise ZeroDivisionError
    """
    for ending in ("end_training", "nothing", "raise"):
        saved = tmp_path / ending
        results = ranks.run(body, 2, real_exit=True, saved=str(saved), ending=ending)
        assert (saved / "manifest.json").exists()
        assert [result.ended for result in results] == [True, True]
        if ending == "end_training":
            assert [result.told["there"] for result in results] == [True, True]


def test_ranks_that_name_different_directories_save_where_rank_zero_does(ranks: Ranks, tmp_path: Path) -> None:
    body = """
        import tempfile
        accelerator = attach(Accelerator(), "async")
        model = accelerator.prepare(nn.Linear(2, 2))
        with tempfile.TemporaryDirectory() as directory:
            accelerator.save_state(directory)
            weight = model.module.weight.detach().clone()
            with torch.no_grad():
                model.module.weight.zero_()
            accelerator.load_state(directory)
            tell(equal=torch.equal(weight, model.module.weight))
    """
    results = ranks.run(body, 2)
    assert [(result.error, result.told["equal"]) for result in results] == [(None, True), (None, True)]


def test_a_load_that_fails_on_one_rank_fails_on_all(ranks: Ranks, tmp_path: Path) -> None:
    body = """
        from tests.accelerate_ckpt.training import Counter
        class Picky(Counter):
            def load_state_dict(self, state):
                if rank == 1:
                    raise KeyError("not for me")
        accelerator = attach(Accelerator(), "sync")
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.register_for_checkpointing(Picky())
        accelerator.save_state(saved)
        accelerator.load_state(saved)
    """
    results = ranks.run(body, 2, saved=str(tmp_path / "saved"))
    assert [result.error for result in results] == ["RankFailedError", "KeyError"]
    assert "failed on rank 1" in results[0].message and "not for me" in results[0].message


@pytest.mark.sampled(2)
@pytest.mark.extended_cells("hook-0", "weights-1", "weights with a hook-0")
@pytest.mark.parametrize(
    ("where", "culprit"),
    [
        ("hook", 0),
        ("hook", 1),
        ("object", 1),
        ("weights", 0),
        ("weights", 1),
        ("weights with a hook", 0),
        ("weights with a hook", 1),
    ],
)
def test_what_one_rank_raises_in_a_save_does_not_leave_the_others_waiting(
    ranks: Ranks, tmp_path: Path, where: str, culprit: int
) -> None:
    body = """
        from tests.accelerate_ckpt.training import Counter
        class Picky(Counter):
            def state_dict(self):
                if rank == culprit:
                    raise KeyError("not mine")
                return super().state_dict()
        accelerator = attach(Accelerator(), "async")
        model = accelerator.prepare(nn.Linear(2, 2))
        if "weights" in where:
            model.module.register_state_dict_pre_hook(lambda *_: Picky().state_dict())
        if where == "object":
            accelerator.register_for_checkpointing(Picky())
        elif where == "weights with a hook":
            accelerator.register_save_state_pre_hook(lambda *_: None)
        elif where == "hook":
            accelerator.register_save_state_pre_hook(lambda *_: Picky().state_dict())
        accelerator.save_state(saved)
        accelerator.end_training()
    """
    results = ranks.run(body, 2, saved=str(tmp_path / "saved"), where=where, culprit=culprit)
    assert [result.ended for result in results] == [True, True]
    assert results[culprit].error == "KeyError"
    assert results[1 - culprit].error in {"RankFailedError", "CheckpointError"}
    assert "not mine" in results[1 - culprit].message
    assert list(tmp_path.iterdir()) == []


def test_rank_zero_ends_when_the_others_have_heard_it(ranks: Ranks, tmp_path: Path) -> None:
    body = """
        import time
        from accelerate_ckpt._state.session import session_of
        accelerator = attach(Accelerator(), "sync")
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state(saved)
        line = session_of(accelerator).agreement._client
        if rank == 1:
            get = line.get
            line.get = lambda key: (time.sleep(1), get(key))[1]
        accelerator.load_state(saved)
        if ending == "end_training":
            accelerator.end_training()
    """
    for ending in ("end_training", "nothing"):
        results = ranks.run(body, 2, saved=str(tmp_path / ending), ending=ending)
        assert [result.error for result in results] == [None, None]


def test_more_and_fewer_ranks_go_on(ranks: Ranks, tmp_path: Path) -> None:
    names: dict[str, Any] = {"strategy": "async", "accumulation": 4, "saved": str(tmp_path / "saved")}
    saving = "    run.train(6, save_after=6, path=saved)\n"
    cut = ranks.run(PREPARED + saving + OWN + "    accelerator.end_training()\n", 2, seed=0, **names)
    loading = "    counter.count = 0\n    accelerator.load_state(saved)\n"
    training = "    run.train(4)\n    tell(after=[p.tolist() for p in run.model.parameters()])\n    accelerator.end_training()\n"
    mean = average([result.told["gradients"] for result in cut])
    for world_size in (1, 3):
        resumed = ranks.run(PREPARED + loading + OWN + training, world_size, seed=1, **names)
        for rank, result in enumerate(resumed):
            assert result.error is None, result.message
            assert result.told["weights"] == cut[0].told["weights"]
            assert result.told["own"][0] == (100 + rank if rank < 2 else 100)
            assert result.told["own"][2] == cut[0].told["own"][2]
            assert flat(result.told["gradients"]) == pytest.approx(flat(mean))
            assert result.told["after"] == resumed[0].told["after"]
        assert len({str(result.told["own"][1]) for result in resumed}) == world_size


def flat(values: Any) -> list[float]:
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [values]


def average(found: list[Any]) -> Any:
    if isinstance(found[0], list):
        return [average(list(values)) for values in zip(*found, strict=True)]
    return sum(found) / len(found)


@pytest.mark.parametrize("strategy", ["async", "sharded"])
def test_rank_zero_and_the_others_use_at_once_what_was_saved(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    body = """
        import json, os, shutil
        accelerator = attach(Accelerator(), strategy)
        accelerator.prepare(nn.Linear(1500, 1500))
        folder = Path(saved)
        accelerator.save_state(folder / "1")
        if accelerator.is_main_process:
            (folder / "1" / "trainer_state.json").write_text(json.dumps({"step": 1}))
        accelerator.save_state(folder / "2")
        if accelerator.is_main_process:
            shutil.rmtree(folder / "2")
        accelerator.wait_for_everyone()
        accelerator.save_state(folder / "3")
        there = (folder / "3").is_dir()
        accelerator.wait_for_everyone()
        accelerator.end_training()
        tell(there=there, left=sorted(os.listdir(folder)), written=(folder / "1" / "trainer_state.json").read_text())
    """
    results = ranks.run(body, 2, strategy=strategy, saved=str(tmp_path / "saved"))
    assert [result.error for result in results] == [None, None]
    for result in results:
        assert result.told == {"there": True, "left": ["1", "3"], "written": '{"step": 1}'}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hook", ["POWER_SGD", "FP16"])
def test_a_communication_hook_whose_state_is_not_saved_is_named(ranks: Ranks, tmp_path: Path, hook: str) -> None:
    body = """
    import logging
    from accelerate import DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType
    from tests.accelerate_ckpt.training import Run
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("accelerate_ckpt").addHandler(handler)
    options = {"comm_state_option": {"start_powerSGD_iter": 2}} if hook == "POWER_SGD" else {}
    kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType[hook], **options)
    accelerator = attach(Accelerator(kwargs_handlers=[kwargs]), "async")
    run = Run(accelerator, seed=0)
    if saves:
        run.train(5, save_after=3, path=saved)
    else:
        accelerator.load_state(saved)
    tell(said=said)
    accelerator.end_training()
    """
    names: dict[str, Any] = {"hook": hook, "saved": str(tmp_path / "saved")}
    ranks.run(body, 2, saves=True, **names)
    said = ranks.run(body, 2, saves=False, **names)[0].told["said"]
    warned = [line for line in said if "is not guaranteed to be exact" in line]
    if hook == "FP16":
        assert warned == []
    else:
        assert "the communication hook of DDP has a state (PowerSGDState) that is not saved" in warned[0]
