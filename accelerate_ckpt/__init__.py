"""Checkpoints for Hugging Face Accelerate: not released yet, nothing here is public.

The engine that this package will translate Accelerate's words into is :mod:`ckpt_core`. It will add ``attach``, which
gives an ``Accelerator`` the strategies ``sync``, ``async`` and ``sharded`` behind its own ``save_state`` and
``load_state``, and a launcher for training scripts that stay as they are.
"""

from __future__ import annotations

__all__: list[str] = []
