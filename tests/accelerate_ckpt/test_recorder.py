"""The flight recorder under Accelerate: what it reports of the steps that a resume repeats after a real SIGKILL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ACCELERATE, ScriptRunner
from tests.support.accelerate_ranks import Ranks

# arguments: the case, whether to resume, and the optimizer step at which it is killed
SCRIPT = """
    import glob, json, os, sys
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from accelerate_ckpt import attach

    case, resumes, dies_at = sys.argv[1], sys.argv[2] == "resume", int(sys.argv[3])
    window = 2 if case in ("accumulates", "inside a window") else 1
    accelerator = Accelerator(gradient_accumulation_steps=window)
    attach(accelerator, "sync", event_log="events", recorder=case != "without")
    set_seed(1)

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            entropy = torch.Generator()
            entropy.seed()
            noise = torch.randn(4, generator=entropy if case == "entropy" else None)
            return torch.full((4,), index / 24) + 0.1 * noise

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            held = []
            for index in range(24):
                held.append(torch.full((4,), index / 24))
                if case == "a noisy stream":
                    yield held.pop() + 0.1 * torch.randn(4)
                elif len(held) > 6:  # shuffles what it holds
                    yield held.pop(int(torch.randint(7, ())))
            yield from held

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    workers = 2 if case == "workers" else 0
    loader = torch.utils.data.DataLoader(Items(), batch_size=2, shuffle=True, num_workers=workers)
    if "stream" in case:
        loader = torch.utils.data.DataLoader(Stream(), batch_size=2)
    evaluation = torch.utils.data.DataLoader(Items(), batch_size=4, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)

    class Count:
        steps = batches = 0

        def state_dict(self):
            return {"steps": self.steps, "batches": self.batches}

        def load_state_dict(self, state):
            vars(self).update(state)

    count = Count()
    accelerator.register_for_checkpointing(count)
    if resumes:
        accelerator.load_state(max(glob.glob("out/*"), key=lambda path: int(path.split("_")[-1])))
        if case == "a moment is lost":
            for state in optimizer.optimizer.state.values():
                state["exp_avg"].zero_()

    went_back = False
    for epoch in range(count.batches // 12, 3):
        for batch in loader:
            count.batches += 1
            with accelerator.accumulate(model):
                loss = (model(batch) - batch).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            count.steps += accelerator.sync_gradients
            if count.batches % 5 == 0 and (accelerator.sync_gradients or case == "inside a window"):
                accelerator.save_state(f"out/at_{count.batches}")
            if not resumes and count.steps == dies_at:
                os.kill(os.getpid(), 9)
            if case == "goes back" and count.batches == 18 and not went_back:
                went_back = True
                accelerator.load_state("out/at_15")
                with torch.no_grad():
                    accelerator.unwrap_model(model)[0].weight.mul_(0.5)
        if case == "evaluates":
            for batch in evaluation:
                with torch.no_grad():
                    model(batch)
    accelerator.end_training()
"""


def told(fork_script: ScriptRunner, directory: Path, case: str, dies_at: int) -> list[dict[str, Any]]:
    """Kill a script at step ``dies_at``, resume it, and return the recorder's comparisons; with 0, only run it."""
    if dies_at:
        killed = fork_script(SCRIPT, case, "first", dies_at, modules=ACCELERATE, check=False)
        assert killed.returncode == -9, killed.stderr
    done = fork_script(SCRIPT, case, "resume" if dies_at else "first", 0, modules=ACCELERATE)
    events = [json.loads(line) for line in (directory / "events").read_text().splitlines()]
    warned = done.stderr.count("UserWarning: this resume is ")
    found = [event for event in events if event["event"] == "ResumeCompared"]
    assert warned == sum(bool(event["differs"]) for event in found)
    return found


@pytest.mark.sampled(2)
@pytest.mark.extended_cells("accumulates-9-4", "evaluates-14-4")
@pytest.mark.parametrize(
    ("case", "dies_at", "repeated"),
    [
        ("accumulates", 9, 4),
        ("inside a window", 9, 2),
        ("workers", 19, 4),
        ("evaluates", 14, 4),
        ("a noisy stream", 19, 4),
    ],
)
def test_an_exact_resume_says_that_its_steps_are_equal(
    fork_script: ScriptRunner, tmp_path: Path, case: str, dies_at: int, repeated: int
) -> None:
    (found,) = told(fork_script, tmp_path, case, dies_at)
    assert found["message"] == f"{repeated} repeated steps equal the first run's, bit for bit"
    assert (found["steps"], found["differs"]) == (repeated, [])
    assert [path.name for path in tmp_path.glob(".*")] == [".out.flight-rank0"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "differs", "dies_at", "step"),
    [
        ("entropy", "data", 19, 16),
        ("a moment is lost", "weights", 19, 16),
        ("a stream that shuffles", "data", 23, 21),
    ],
)
def test_what_a_resume_does_not_have_is_said(
    fork_script: ScriptRunner, tmp_path: Path, case: str, differs: str, dies_at: int, step: int
) -> None:
    (found,) = told(fork_script, tmp_path, case, dies_at)
    assert differs in found["differs"]
    assert f"step {step}" in found["message"]


def test_a_run_that_goes_back_to_a_state_of_its_own_is_compared_with_nothing(
    fork_script: ScriptRunner, tmp_path: Path
) -> None:
    assert told(fork_script, tmp_path, "goes back", 0) == []


def test_the_recorder_can_be_left_out(fork_script: ScriptRunner, tmp_path: Path) -> None:
    assert told(fork_script, tmp_path, "without", 0) == []
    assert list(tmp_path.glob(".*")) == []


CAMPAIGN = """
    import dataclasses, json, sys
    from pathlib import Path
    from tests.campaign.accelerate_cases import BROKEN, CASES
    from tests.campaign.accelerate_runs import judge
    from tests.campaign.judging import Point

    for name in sys.argv[2:]:
        place = Path(sys.argv[1], name)
        found = judge({**CASES, **BROKEN}[name], place, [Point("middle", (1, 1), (1, 4))])
        print(json.dumps(dataclasses.asdict(found["middle"])))
"""


def judged(fork_script: ScriptRunner, directory: Path, *names: str) -> list[dict[str, Any]]:
    done = fork_script(CAMPAIGN, directory, *names, modules=ACCELERATE)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_recorder_alone_sees_what_an_engine_forgets(fork_script: ScriptRunner, tmp_path: Path) -> None:
    differs = {
        "forgets the generators": "generators",
        "forgets a batch": "data",
        "forgets a moment": "weights",
        "forgets a buffer": "weights",
        "forgets a schedule": "rates",
        "forgets the gradients": "weights",
        "forgets the order": "data",
    }
    for found, what in zip(judged(fork_script, tmp_path, *differs), differs.values(), strict=True):
        assert found["verdict"] == "said", found
        assert what in found["differs"]
        assert found["warned"] == []


@pytest.mark.extended
def test_what_a_script_keeps_to_itself_is_seen_by_the_recorder(fork_script: ScriptRunner, tmp_path: Path) -> None:
    names = ["average, not registered", "local factor by step", "model with a generator", "metric of the script"]
    for found in judged(fork_script, tmp_path, *(f"script: {name}" for name in names)):
        assert found["wrong"] and {"loss", "weights"} & set(found["differs"]), found


RANKS = """
    import os, signal, warnings
    from accelerate.utils import set_seed

    events = []
    accelerator = attach(Accelerator(), "sync", listeners=[events.append])
    set_seed(1)

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return torch.full((4,), index / 32) + 0.1 * torch.randn(4) + (resumes and rank == other)

    model = torch.nn.Linear(4, 4)
    loader = torch.utils.data.DataLoader(Items(), batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumes:
        accelerator.load_state(folder + "/saved")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, batch in enumerate(loader):
            accelerator.backward((model(batch) - batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if not resumes and step == 2:
                accelerator.save_state(folder + "/saved")
            if not resumes and step == 6:
                os.kill(os.getpid(), signal.SIGKILL)
        accelerator.end_training()
    found = [event for event in events if type(event).__name__ == "ResumeCompared"]
    tell(found=[[event.message, list(event.differs)] for event in found])
    tell(warned=[str(one.message) for one in caught if "repeats one of the interrupted run" in str(one.message)])
"""


@pytest.mark.extended_cells("0")
@pytest.mark.parametrize("other", [-1, 0, 1])
def test_each_of_two_ranks_compares_the_steps_that_it_repeats(ranks: Ranks, tmp_path: Path, other: int) -> None:
    ranks.run(RANKS, 2, folder=str(tmp_path / "out"), resumes=False, other=other)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".out.flight-rank0", ".out.flight-rank1"]
    results = ranks.run(RANKS, 2, folder=str(tmp_path / "out"), resumes=True, other=other)
    for rank, result in enumerate(results):
        assert result.error is None, result.message
        ((message, differs),) = result.told["found"]
        if rank == other:
            assert "step 4 repeats one of the interrupted run" in message and "data" in differs
        elif other < 0:
            assert (message, differs) == ("4 repeated steps equal the first run's, bit for bit", [])
        else:
            assert "data" not in differs  # only the average of the gradients differs here
        assert len(result.told["warned"]) == (rank == 0 and other >= 0)
