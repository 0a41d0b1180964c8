"""Buffers of one rank: which ones they are, under which names, and that they are restored."""

from __future__ import annotations

import torch

from ckpt_core.state.kinds import buffers_by_name, capture_buffers, restore_buffers


class Nested(torch.nn.Module):
    """Has two parts whose names are the same once the prefix ``module.`` is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.BatchNorm1d(2)
        self.module = torch.nn.Module()
        self.module.part = torch.nn.BatchNorm1d(2)
        self.register_buffer("left_out", torch.zeros(1), persistent=False)


def test_each_buffer_of_a_rank_comes_back_to_where_it_was() -> None:
    there, here = Nested(), Nested()
    with torch.no_grad():
        there.part.running_mean.fill_(1.0)
        there.module.part.running_mean.fill_(2.0)
        there.left_out.fill_(3.0)
    saved = capture_buffers(there)
    there.part.running_mean.fill_(9.0)
    restore_buffers(here, saved)
    assert here.part.running_mean.tolist() == [1.0, 1.0]
    assert here.module.part.running_mean.tolist() == [2.0, 2.0]
    assert here.left_out.tolist() == [0.0]


def test_a_buffer_is_found_without_its_wrapper_where_no_other_has_that_name() -> None:
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.BatchNorm1d(2)
    assert buffers_by_name(wrapped)["running_mean"] is wrapped.module.running_mean
