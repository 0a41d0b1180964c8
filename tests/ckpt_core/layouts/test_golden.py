"""Checkpoints of every released format version stay readable, and today's writer still writes the current one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, verify
from ckpt_core._layouts.torch_file.manifest import FOOTER_SIZE, FORMAT_VERSION

GOLDEN = Path(__file__).parents[2] / "golden"


def golden_state() -> dict[str, Any]:
    shared = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {
        "state_dict": {"embed": shared, "head": shared, "bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "epoch": 2,
        "names": ["a", None, True, 1.25],
        "empty": torch.empty(0, 7, dtype=torch.int64),
    }


@pytest.mark.parametrize("name", ["torch_file_v1.ckpt"])
def test_every_released_version_is_readable(name: str) -> None:
    path = GOLDEN / name
    assert verify(path)
    expected = golden_state()
    for loaded in (Checkpointer(strategy="sync").load(path), torch.load(path, weights_only=True)):
        assert list(loaded) == list(expected)
        for key in ("embed", "head", "bias"):
            assert loaded["state_dict"][key].dtype == expected["state_dict"][key].dtype
            assert torch.equal(loaded["state_dict"][key], expected["state_dict"][key])
        assert loaded["state_dict"]["embed"].data_ptr() == loaded["state_dict"]["head"].data_ptr()
        assert loaded["optimizer_states"] == expected["optimizer_states"]
        assert (loaded["epoch"], loaded["names"]) == (2, ["a", None, True, 1.25])
        assert loaded["empty"].shape == (0, 7)


def test_the_version_that_is_written_has_a_golden_file(tmp_path: Path) -> None:
    assert (GOLDEN / f"torch_file_v{FORMAT_VERSION}.ckpt").exists()
    Checkpointer(strategy="sync").save(golden_state(), tmp_path / "now.ckpt")
    assert f"torch_file {FORMAT_VERSION:04d} ".encode() in (tmp_path / "now.ckpt").read_bytes()[-FOOTER_SIZE:]
