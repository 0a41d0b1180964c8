"""The states that the benchmarks save, as Lightning would hand them to a CheckpointIO: by default, a GPT-2's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch


def gpt_state(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> dict[str, Any]:
    """Return weights (148 tensors for 12 layers) and Adam's state; the defaults make 1.49 GB."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        weights[name] = torch.empty(*shape).normal_(generator=generator)

    add("transformer.wte.weight", vocabulary, width)
    add("transformer.wpe.weight", context, width)
    for layer in range(layers):
        prefix = f"transformer.h.{layer}"
        for name, rows in (("attn.c_attn", 3 * width), ("attn.c_proj", width), ("mlp.c_fc", 4 * width)):
            add(f"{prefix}.{name}.weight", rows, width)
            add(f"{prefix}.{name}.bias", rows)
        add(f"{prefix}.mlp.c_proj.weight", width, 4 * width)
        add(f"{prefix}.mlp.c_proj.bias", width)
        for norm in ("ln_1", "ln_2"):
            add(f"{prefix}.{norm}.weight", width)
            add(f"{prefix}.{norm}.bias", width)
    add("transformer.ln_f.weight", width)
    add("transformer.ln_f.bias", width)
    moments = {
        index: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(w), "exp_avg_sq": torch.rand_like(w)}
        for index, w in enumerate(weights.values())
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(range(len(weights)))}]
    return {
        "epoch": 0,
        "global_step": 1,
        "state_dict": weights,
        "optimizer_states": [{"state": moments, "param_groups": groups}],
        "lr_schedulers": [],
        "lightning_ckpt": {},
    }


def equal_tensors(number: int, megabytes: float) -> dict[str, Any]:
    """Return weights of one size, without an optimizer."""
    weights = {f"layer.{index}.weight": torch.rand(round(megabytes * 1e6 / 4)) for index in range(number)}
    optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
    return {"epoch": 0, "global_step": 1, "state_dict": weights, "optimizer_states": [optimizer], "lr_schedulers": []}


def state_for(options: argparse.Namespace) -> dict[str, Any]:
    """Return the state that the command line asks for."""
    if options.tensors is not None:
        return equal_tensors(options.tensors, options.tensor_mb)
    return gpt_state(options.layers)


def tensor_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of all tensors in ``state``."""
    return sum(tensor.nbytes for tensor in tensors_in(state))


def tensors_in(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state."""
    yield from state["state_dict"].values()
    for entry in state["optimizer_states"][0]["state"].values():
        yield from entry.values()
