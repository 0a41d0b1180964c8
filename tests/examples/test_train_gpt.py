"""The training script of the examples: its data, its model, and what it leaves behind."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.conftest import LIGHTNING, ScriptRunner

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = "--cpu --devices 1 --max-steps 4 --every-n-steps 2 --accumulate 2 --width 16 --layers 1 --block-size 8"


@pytest.fixture
def train_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    return importlib.import_module("train_gpt")


def test_text_is_the_standard_library_and_always_the_same(train_gpt: ModuleType) -> None:
    text = train_gpt.standard_library_text(300_000)
    assert text.dtype == torch.uint8
    assert len(text) == 300_000
    assert int(text.max()) < train_gpt.VOCABULARY
    assert b"import" in text.numpy().tobytes()
    assert torch.equal(text, train_gpt.standard_library_text(300_000))


def test_target_is_the_next_character(train_gpt: ModuleType) -> None:
    blocks = train_gpt.TextBlocks(torch.arange(10, dtype=torch.uint8), length=4)
    assert len(blocks) == 2
    tokens, targets = blocks[1]
    assert tokens.tolist() == [4, 5, 6, 7]
    assert targets.tolist() == [5, 6, 7, 8]


def test_model_does_not_see_the_future(train_gpt: ModuleType) -> None:
    torch.manual_seed(0)
    model = train_gpt.CharacterGPT(width=16, layers=2, heads=2, block_size=8).eval()
    tokens = torch.randint(0, train_gpt.VOCABULARY, (1, 8))
    changed = tokens.clone()
    changed[0, 5] += 1 if int(tokens[0, 5]) == 0 else -1
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_learning_rate_warms_up_and_decays(train_gpt: ModuleType) -> None:
    model = train_gpt.CharacterGPT(width=16, layers=1, heads=2, learning_rate=1.0, warmup_steps=4, max_steps=20)
    configured = model.configure_optimizers()
    rates = []
    for _ in range(20):
        rates.append(configured["optimizer"].param_groups[0]["lr"])
        configured["optimizer"].step()
        configured["lr_scheduler"]["scheduler"].step()
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] < 0.02
    assert configured["lr_scheduler"]["interval"] == "step"


def test_hash_covers_structure_values_and_every_bit(train_gpt: ModuleType) -> None:
    state = {"a": torch.zeros(3), "b": [1, 2.0]}
    flipped = {"a": torch.tensor([0.0, -0.0, 0.0]), "b": [1, 2.0]}
    assert train_gpt.sha256(state) == train_gpt.sha256({"a": torch.zeros(3), "b": [1, 2.0]})
    others = (flipped, {"a": torch.zeros(3, 1), "b": [1, 2.0]}, {"a": torch.zeros(3), "b": [1, 3.0]})
    assert len({train_gpt.sha256(other) for other in (state, *others)}) == 4


def test_script_trains_and_writes_its_result(train_gpt: ModuleType, fork_script: ScriptRunner, tmp_path: Path) -> None:
    script, events = REPOSITORY / "examples" / "train_gpt.py", tmp_path / "events.jsonl"
    fork_script(script, "--output", tmp_path, "--event-log", events, *TINY.split(), modules=LIGHTNING)

    result = json.loads((tmp_path / "result.json").read_text())
    steps = [json.loads(line) for line in (tmp_path / "steps-rank0.jsonl").read_text().splitlines()]
    final = torch.load(tmp_path / "final.ckpt", weights_only=True)
    assert result["global_step"] == final["global_step"] == 4
    assert [step["step"] for step in steps] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert result["weights_sha256"] == train_gpt.sha256(final["state_dict"])
    assert result["optimizer_sha256"] == train_gpt.sha256(final["optimizer_states"][0])
    committed = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    assert committed.count("SaveCommitted") >= 2
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
