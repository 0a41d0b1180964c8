"""Fixtures of several modules."""

from __future__ import annotations

from tests.lightning_ckpt.signal_ranks import job

__all__ = ["job"]
