"""What scripts do on an accelerator with Accelerate: half precision, generators and running values on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import GradScalerKwargs
from torch.utils.data import DataLoader

from tests.campaign.accelerate_runs import Case, cross_entropy
from tests.campaign.data import Items
from tests.campaign.device import HAS_CUDA


def _noisy(env: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return cross_entropy(env, (x + 0.1 * torch.randn_like(x), y))


def _own_generator(env: Any) -> None:
    env.generator = torch.Generator(env.accelerator.device).manual_seed(5)


def _from_own_generator(env: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return cross_entropy(env, (x + torch.randn(x.shape, device=x.device, generator=env.generator), y))


def _kept(env: Any) -> None:
    env.drift = torch.zeros(8, device=env.accelerator.device)


def _less_what_is_kept(env: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    env.drift = 0.9 * env.drift + 0.1 * x.mean(0)
    return cross_entropy(env, (x - env.drift, y))


def _less_what_is_kept_in_place(env: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    env.drift.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return cross_entropy(env, (x - env.drift, y))


def _autocasts(env: Any, batch: Any) -> torch.Tensor:
    with env.accelerator.autocast():
        return _noisy(env, batch)


def _overflows(env: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(env, batch) * (1e6 if env.progress.batch == 2 else 1.0)


def _on_a_side_stream(env: Any, batch: Any) -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = _noisy(env, batch)
    torch.cuda.current_stream().wait_stream(side)
    return loss


def _evaluates(env: Any) -> None:
    env.model.eval()
    with torch.no_grad():
        for x, y in env.accelerator.prepare(DataLoader(Items(16), batch_size=8)):
            env.accelerator.gather_for_metrics(cross_entropy(env, (x + torch.randn_like(x), y)))
    env.model.train()


def _steps(**settings: Any) -> Callable[[Any], Any]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


def _running_mean(env: Any) -> None:
    env.total = torch.zeros((), device=env.accelerator.device)


def _adds(env: Any) -> None:
    env.total += env.last
    env.local["total"] = float(env.total)


def _compiles(env: Any) -> None:
    env.model.compile()


_ON_ANY: dict[str, Case] = {
    "noise": Case(loss=_noisy),
    "own generator": Case(begin=_own_generator, loss=_from_own_generator),
    "keeps": Case(begin=_kept, loss=_less_what_is_kept),
    "keeps in place": Case(begin=_kept, loss=_less_what_is_kept_in_place),
    "running sum": Case(begin=_running_mean, loss=_noisy, batch=_adds),
    "evaluates": Case(loss=_noisy, half=_evaluates),
}

_ON_CUDA: dict[str, Case] = {
    "fp16": Case(loss=_autocasts, accelerator=lambda: {"mixed_precision": "fp16"}),
    "fp16, accumulates, clips": Case(
        loss=_noisy, clips=True, accelerator=lambda: {"mixed_precision": "fp16", "gradient_accumulation_steps": 4}
    ),
    "fp16, overflows": Case(loss=_overflows, accelerator=lambda: {"mixed_precision": "fp16"}),
    "fp16, scaler grows": Case(
        loss=_noisy,
        accelerator=lambda: {
            "mixed_precision": "fp16",
            "kwargs_handlers": [GradScalerKwargs(init_scale=2.0, growth_interval=3)],
        },
    ),
    "bf16": Case(loss=_noisy, accelerator=lambda: {"mixed_precision": "bf16"}),
    "fused": Case(loss=_noisy, optimizer=_steps(fused=True)),
    "fused, fp16": Case(loss=_noisy, optimizer=_steps(fused=True), accelerator=lambda: {"mixed_precision": "fp16"}),
    "capturable": Case(loss=_noisy, optimizer=_steps(capturable=True)),
    "foreach": Case(loss=_noisy, optimizer=_steps(foreach=True)),
    "side stream": Case(loss=_on_a_side_stream),
    "compiled": Case(loss=_noisy, prepared=_compiles),
    "dynamo": Case(loss=_noisy, accelerator=lambda: {"dynamo_backend": "inductor"}),
    "pinned, workers": Case(
        loss=_noisy,
        loader=lambda: DataLoader(
            Items(), batch_size=8, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True
        ),
    ),
    "rng_types": Case(loss=_noisy, accelerator=lambda: {"rng_types": ["torch", "cuda", "generator"]}),
}

CASES = {**_ON_ANY, **(_ON_CUDA if HAS_CUDA else {})}
