"""Fixtures that several modules of tests use."""

from __future__ import annotations

from tests.lightning_ckpt.sharded_runs import runs
from tests.lightning_ckpt.signal_ranks import job

__all__ = ["job", "runs"]
