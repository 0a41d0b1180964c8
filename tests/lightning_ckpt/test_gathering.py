"""Gathered state keeps its types, and its tensors are in host memory."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest
import torch

from lightning_ckpt._routing.gathering import on_host
from tests.support.accelerators import Accelerator


@pytest.mark.extended
def test_kinds_of_users_stay_what_they_are(accelerator: Accelerator) -> None:
    tensor = torch.ones(2, device=accelerator.type)
    given = {"counts": Counter("aab"), "order": OrderedDict(a=1), "parts": [tensor, (1, 2)]}
    found = on_host(given)
    assert {name: type(value) for name, value in found.items()} == {
        "counts": Counter,
        "order": OrderedDict,
        "parts": list,
    }
    assert found["counts"]["c"] == 0
    assert found["parts"][0].device.type == "cpu"
    assert found["parts"][0].tolist() == [1.0, 1.0]
