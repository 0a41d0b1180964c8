"""What users do on an accelerator with Lightning: half precision, generators, queues and augmentation on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torchmetrics import MeanMetric

from tests.campaign.device import DEVICE, HAS_CUDA
from tests.campaign.lightning_runs import Case, Net, Validates
from tests.campaign.loaders import mapped


class Noisy(Net):
    """Draws on the device in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((x + 0.1 * torch.randn_like(x), y), batch_idx)


class OwnGenerator(Net):
    """Draws on the device from a generator of its own."""

    def __init__(self, loader: Any, when: str) -> None:
        super().__init__(loader)
        self.when = when
        self.generator: torch.Generator | None = None

    def _make(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(5)

    def setup(self, stage: str) -> None:
        if self.when == "setup":
            self.generator = torch.Generator(DEVICE).manual_seed(5)

    def on_fit_start(self) -> None:
        if self.when == "fit":
            self._make()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.generator is None:
            self._make()
        x, y = batch
        return x + 0.1 * torch.randn(x.shape, device=x.device, generator=self.generator), y


class Keeps(Net):
    """Keeps tensors of the device in attributes: a queue, running means, in a list and a dictionary."""

    def __init__(self, loader: Any, kind: str) -> None:
        super().__init__(loader)
        self.kind = kind
        self.queue: Any = None
        self.register_buffer("mean", torch.zeros(8), persistent=kind != "buffer")

    def on_fit_start(self) -> None:
        zeros = torch.zeros(8, device=self.device)
        if self.queue is None:
            self.queue = {"list": [zeros], "dictionary": {"a": zeros}}.get(self.kind, zeros)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        now = x.mean(0).detach()
        if self.kind == "list":
            self.queue = [*self.queue[-2:], now]
            held = torch.stack(self.queue).mean(0)
        elif self.kind == "dictionary":
            held = self.queue["a"] = 0.9 * self.queue["a"] + 0.1 * now
        elif self.kind == "in place":
            held = self.queue.mul_(0.9).add_(now, alpha=0.1).clone()
        elif self.kind == "buffer":
            held = self.mean.mul_(0.9).add_(now, alpha=0.1).clone()
        else:
            held = self.queue = 0.9 * self.queue + 0.1 * now
        return super().training_step((x - held, y), batch_idx)


class Measures(Net):
    """A metric on the device, which logs and changes what is trained."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss * (1 + 0.1 * self.mean.compute())


class SideStream(Net):
    """Computes the loss on a stream of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = super().training_step(batch, batch_idx)
        torch.cuda.current_stream().wait_stream(side)
        return loss


class Compiled(Noisy):
    """A compiled part, which draws."""

    def configure_model(self) -> None:
        self.backbone.compile()
        self.head.compile()


class Graphed(Noisy):
    """A part whose forward and backward passes are replays of CUDA graphs."""

    def on_fit_start(self) -> None:
        sample = torch.zeros(8, 16, device=self.device, requires_grad=True)
        self.head = torch.cuda.make_graphed_callables(self.head, (sample,))


class GraphedStep(Net):
    """A whole step with its optimizer, captured once and replayed."""

    automatic_optimization = False

    def on_fit_start(self) -> None:
        self.graph: Any = None
        self.warm = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        if self.warm < 3:
            self.warm += 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                optimizer.zero_grad(set_to_none=True)
                loss = self.loss(batch)
                self.manual_backward(loss)
                optimizer.step()
            torch.cuda.current_stream().wait_stream(side)
            self.log("loss", loss.detach())
            return
        if self.graph is None:
            self.fixed = [one.clone() for one in batch]
            self.graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(self.graph):
                self.fixed_loss = self.loss(self.fixed)
                self.fixed_loss.backward()
                optimizer.optimizer.step()
        for held, one in zip(self.fixed, batch, strict=True):
            held.copy_(one)
        self.graph.replay()
        self.log("loss", self.fixed_loss.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, capturable=True)


class Scales(Net):
    """Manual optimization of two optimizers in half precision."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.log(f"loss{number}", loss.detach())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.backbone.parameters(), lr=1e-2, momentum=0.9), torch.optim.Adam(
            self.head.parameters(), lr=1e-2
        )


class Overflows(Net):
    """Overflows in half precision now and then, so that the scaler skips steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (1e6 if batch_idx == 2 else 1.0)


class Evaluates(Validates):
    """A validation that draws on the device."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", self.loss((x + torch.randn_like(x), y)))


class Convolves(Net):
    """Convolutions."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.backbone = torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 2, 4)),
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.Dropout2d(0.2),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        )


class Attends(Net):
    """Attention with dropout, in a fused kernel."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.lift = torch.nn.Linear(8, 64)
        self.backbone = torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.lift(x).view(1, 4, -1, 16)
        mixed = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.1)
        return self.head(self.backbone(mixed.reshape(-1, 64)))


def _steps(**settings: Any) -> Callable[[Any], Any]:
    class Steps(Noisy):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, **settings)

    return Steps


class _True(Net):
    """All of it in the precision of the Trainer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.backbone[0].weight.dtype)).float()


def _sgd(loader: Any) -> Any:
    class Momentum(_True):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

    return Momentum(loader)


def _sharded(loader: Any) -> Any:
    class Sharded(Noisy):
        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            for part in (self.backbone, self.head):
                if not isinstance(part, torch.distributed.fsdp.FSDPModule):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

    return Sharded(loader)


_ON_ANY: dict[str, Case] = {
    "noise": Case(model=Noisy),
    **{
        f"generator made at {when}": Case(model=lambda loader, when=when: OwnGenerator(loader, when))
        for when in ("setup", "fit", "first batch")
    },
    **{
        f"keeps {kind}": Case(model=lambda loader, kind=kind: Keeps(loader, kind))
        for kind in ("tensor", "in place", "list", "dictionary", "buffer")
    },
    "measures": Case(model=Measures),
    "validates": Case(model=Evaluates, trainer={"num_sanity_val_steps": 1}),
    "half the batches": Case(model=Noisy, trainer={"limit_train_batches": 0.5}),
}

_ON_CUDA: dict[str, Case] = {
    "fp16": Case(model=Noisy, trainer={"precision": "16-mixed"}),
    "fp16, accumulates, clips": Case(
        model=Noisy, trainer={"precision": "16-mixed", "accumulate_grad_batches": 4, "gradient_clip_val": 0.3}
    ),
    "fp16, overflows": Case(model=Overflows, trainer={"precision": "16-mixed"}),
    "fp16, two optimizers": Case(model=Scales, trainer={"precision": "16-mixed"}),
    "fp16, true": Case(model=_sgd, trainer={"precision": "16-true"}),
    "bf16": Case(model=Noisy, trainer={"precision": "bf16-mixed"}),
    "bf16, true": Case(model=_True, trainer={"precision": "bf16-true"}),
    "fused": Case(model=_steps(fused=True)),
    "fused, fp16": Case(model=_steps(fused=True), trainer={"precision": "16-mixed"}),
    "capturable": Case(model=_steps(capturable=True)),
    "foreach": Case(model=_steps(foreach=True)),
    "amsgrad": Case(model=_steps(amsgrad=True, fused=True)),
    "side stream": Case(model=SideStream),
    "compiled": Case(model=Compiled),
    "graphed": Case(model=Graphed),
    "graphed step": Case(model=GraphedStep),
    "convolves": Case(model=Convolves),
    "attends": Case(model=Attends),
    "attends, bf16": Case(model=Attends, trainer={"precision": "bf16-mixed"}),
    "pinned, workers": Case(model=Noisy, loader=mapped(num_workers=2, pin_memory=True, persistent_workers=True)),
    "average": Case(model=Noisy, callbacks=lambda: [WeightAveraging(use_buffers=False)]),
    "average on the host": Case(model=Noisy, callbacks=lambda: [WeightAveraging(device="cpu")]),
    "benchmarks": Case(model=Noisy, trainer={"benchmark": True}),
    "DDP": Case(model=Noisy, trainer={"strategy": "ddp"}),
    "FSDP2": Case(model=_sharded, trainer={"strategy": ModelParallelStrategy()}),
}

CASES = {**_ON_ANY, **(_ON_CUDA if HAS_CUDA else {})}
