"""Whether a class or a file belongs to the user or to a library."""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import xxhash

import ckpt_core
from ckpt_core.state.code_origin import is_library, is_users_class, is_users_file


class Mine(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        (__file__, True),
        (os.path.relpath(__file__), True),
        ("/home/me/site-packages-study/train.py", True),
        ("/venv/lib/python3.11/site-packages/timm/models.py", False),
        ("/usr/lib/python3/dist-packages/yaml.py", False),
        (json.__file__, False),
        (torch.__file__, False),
        (ckpt_core.__file__, False),
        (os.path.relpath(ckpt_core.__file__), False),
        ("<frozen importlib>", False),
        ("", False),
        (None, False),
    ],
)
def test_a_file_is_the_users_unless_it_is_installed_or_ours(file: str | None, is_users: bool) -> None:
    assert is_users_file(file) is is_users


def test_a_class_is_the_users_by_its_file_and_one_without_a_file_in_the_program_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = type("Typed", (), {"__module__": "__main__"})
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    kinds = (Mine, typed, torch.nn.Linear, xxhash.xxh3_64, dict)
    assert [kind for kind in kinds if is_users_class(kind)] == [Mine, typed]


def test_libraries_are_known_by_name() -> None:
    average = type("EMAModel", (), {"__module__": "diffusers.training_utils"})  # holds a state of the training
    noise = type("DDPMScheduler", (), {"__module__": "diffusers.schedulers.scheduling_ddpm"})
    kinds = (Mine, torch.nn.Linear, collections.OrderedDict, Path, ckpt_core.Checkpointer, average, noise)
    assert [is_library(kind) for kind in kinds] == [False, True, True, True, True, False, True]


def test_modules_of_libraries_that_keep_nothing_are_theirs() -> None:
    assert is_library(type("RandomFlip", (torch.nn.Module,), {"__module__": "kornia.augmentation._2d.flip"}))
