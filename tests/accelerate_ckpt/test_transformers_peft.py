"""``ResumableCallback`` with adapters of PEFT: exact resumes, and files that PEFT itself reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the optional extra is not installed")

import peft  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from accelerate_ckpt._state.session import close_sessions  # noqa: E402
from accelerate_ckpt.integrations.transformers import ResumableCallback  # noqa: E402
from ckpt_core import small_states  # noqa: E402


class StopError(Exception):
    """Ends a training where the test wants it."""


class StopAfter(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 5:
            raise StopError


@pytest.fixture(autouse=True)
def _fresh(fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(small_states, "SMALL_STATE_BYTES", 0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    close_sessions()


def base() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def trainer_for(folder: Path, **arguments: Any) -> Trainer:
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.2, fan_in_fan_out=True)
    model = peft.get_peft_model(base(), adapters)
    defaults = {
        "max_steps": 8,
        "save_steps": 2,
        "learning_rate": 0.05,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    text = [{"input_ids": torch.arange(8) * index % 16, "labels": torch.arange(8)} for index in range(32)]
    args = TrainingArguments(str(folder), **{**defaults, **arguments})
    trainer = Trainer(model, args, train_dataset=text, eval_dataset=text[:8])
    ResumableCallback(trainer, strategy="async")
    return trainer


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.filterwarnings("ignore")  # warnings of PEFT and transformers about each other
def test_adapters_go_on_and_can_be_read_by_peft(tmp_path: Path) -> None:
    whole = trainer_for(tmp_path / "whole")
    whole.train()
    cut = trainer_for(tmp_path / "cut")
    cut.add_callback(StopAfter())
    with pytest.raises(StopError):
        cut.train()
    resumed = trainer_for(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert_same(resumed.model.state_dict(), whole.model.state_dict())
    read = peft.PeftModel.from_pretrained(base(), str(tmp_path / "cut" / "checkpoint-8"))
    assert_same(read.state_dict(), resumed.model.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    # a learning rate so large that each step is worse than the one before
    trainer = trainer_for(tmp_path, learning_rate=5.0, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best is not None and not best.endswith("checkpoint-8")
    read = peft.PeftModel.from_pretrained(base(), best)
    assert_same(read.state_dict(), trainer.model.state_dict())
