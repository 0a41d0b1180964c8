"""Train a small character-level GPT with Lightning so that it may be killed at any moment and resumes bit for bit.

The text is real and needs no download: the source files of Python's own standard library.

    python train_gpt.py --output runs/gpt --max-steps 200
    python train_gpt.py --output runs/gpt --max-steps 200 --resume    # after a crash, as often as needed

What makes the resume exact are the two objects given to the Trainer in :func:`build_trainer`; the model, the data
loader and the optimizer are as in any other script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ckpt_core.events import EventLog, SaveCommitted, SaveStarted, SnapshotTaken
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, SyncCheckpointIO

VOCABULARY = 128  # ASCII: every character is its own token


def standard_library_text(limit: int) -> Tensor:
    """Read the top-level source files of the standard library, in the order of their names.

    Args:
        limit: Characters to read at most.

    Returns:
        The text as one uint8 tensor of ASCII codes; other characters are replaced by ``?``.
    """
    text = bytearray()
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += source.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class TextBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of text that follow one another; the target is the same block one character later."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        block = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return block[:-1], block[1:]


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(x)


class CharacterGPT(L.LightningModule):
    """A GPT over characters, trained with AdamW, linear warm-up and cosine decay.

    Args:
        width: Size of the hidden state.
        layers: Number of transformer layers.
        heads: Attention heads per layer.
        block_size: Longest text in characters.
        dropout: Probability of dropping a value; above 0, the training depends on the random state.
        learning_rate: Peak learning rate.
        warmup_steps: Optimizer steps until the peak.
        max_steps: Optimizer steps until the learning rate has decayed to nothing.
    """

    def __init__(
        self,
        width: int = 256,
        layers: int = 6,
        heads: int = 8,
        block_size: int = 64,
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
        warmup_steps: int = 10,
        max_steps: int = 200,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(block_size, width))
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding[: tokens.shape[1]]
        return self.head(self.blocks(self.embedding_dropout(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        warmup, total = self.hparams["warmup_steps"], self.hparams["max_steps"]

        def scale(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"], weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StepLog(Callback):
    """Append one line per batch and rank to ``steps-rank<n>.jsonl``: what was computed, and when.

    A line is written as soon as its batch is done, so the log survives a kill. Batches that a resumed run repeats are
    in it twice; the later line counts.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start = time.time()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record = {
            "epoch": trainer.current_epoch,
            "batch": batch_idx,
            "step": trainer.global_step,
            "loss": outputs["loss"].item(),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "start": self._start,
            "end": time.time(),
        }
        with (self.directory / f"steps-rank{trainer.global_rank}.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")


class LoggedTorchCheckpointIO(TorchCheckpointIO):
    """Lightning's own plugin, whose saves are logged like ours, for comparison.

    Args:
        event_log: Path of the log file.
    """

    def __init__(self, event_log: str) -> None:
        super().__init__()
        self._log = EventLog(event_log)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        started = SaveStarted(path=str(path))
        self._log(started)
        super().save_checkpoint(checkpoint, path, storage_options)
        size = Path(path).stat().st_size
        taken = SnapshotTaken(path=str(path), bytes=size, stall_seconds=time.time() - started.time)
        self._log(taken)
        self._log(SaveCommitted(path=str(path), bytes=size, background_seconds=0.0, time=taken.time))


def sha256(value: Any) -> str:
    """Return the SHA-256 of a nested state: structure, plain values, and the bytes of all tensors."""
    digest = hashlib.sha256()

    def update(part: Any) -> None:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(part, dict):
            for key, item in part.items():
                digest.update(f"{key!r}:".encode())
                update(item)
        elif isinstance(part, (list, tuple)):
            for item in part:
                update(item)
        else:
            digest.update(repr(part).encode())

    update(value)
    return digest.hexdigest()


def build_trainer(options: argparse.Namespace) -> L.Trainer:
    """Return the Trainer with exact, asynchronous checkpoints."""
    directory = options.output / "checkpoints"
    saving = {"dirpath": directory, "every_n_train_steps": options.every_n_steps, "save_top_k": 1, "save_last": True}
    callbacks: list[Callback] = [StepLog(options.output)]
    plugins: list[Any] = []
    logs = {"event_log": options.event_log, "report": options.report}
    if options.strategy_io == "async":
        callbacks.append(ResumableCheckpoint(**saving))
        plugins.append(AsyncCheckpointIO(**logs))
    elif options.strategy_io == "sync":
        callbacks.append(ResumableCheckpoint(**saving))
        plugins.append(SyncCheckpointIO(**logs))
    else:  # what Lightning does by itself, for comparison
        callbacks.append(ModelCheckpoint(**saving))
        if options.event_log is not None:
            plugins.append(LoggedTorchCheckpointIO(options.event_log))
    return L.Trainer(
        accelerator="cpu" if options.cpu else "auto",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_steps=options.max_steps,
        limit_train_batches=options.batches_per_epoch,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        plugins=plugins,
        default_root_dir=options.output,
        logger=False,
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser.add_argument_group("run")
    run.add_argument("--output", type=Path, required=True, help="directory for checkpoints, logs and the result")
    run.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --output")
    run.add_argument("--devices", type=int, default=2, help="training processes (default: 2)")
    run.add_argument("--cpu", action="store_true", help="train on the CPU even if there is an accelerator")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--max-steps", type=int, default=200, help="optimizer steps (default: 200)")
    run.add_argument("--batches-per-epoch", type=int, default=None, help="shorten the epochs to this many batches")
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument("--strategy-io", choices=["async", "sync", "none"], default="async")
    saving.add_argument("--every-n-steps", type=int, default=10, help="optimizer steps between saves (default: 10)")
    saving.add_argument("--event-log", default=None, help="append what the saves do to this JSON Lines file")
    saving.add_argument("--report", default=None, help="write a page about the run here at its end")
    model = parser.add_argument_group("model and data")
    model.add_argument("--width", type=int, default=256)
    model.add_argument("--layers", type=int, default=6)
    model.add_argument("--block-size", type=int, default=64, help="characters per sample (default: 64)")
    model.add_argument("--batch-size", type=int, default=4, help="samples per process and batch (default: 4)")
    model.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step (default: 1)")
    model.add_argument("--text-limit", type=int, default=2_000_000, help="characters of text (default: 2 million)")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    L.seed_everything(options.seed)
    model = CharacterGPT(
        width=options.width, layers=options.layers, block_size=options.block_size, max_steps=options.max_steps
    )
    text = TextBlocks(standard_library_text(options.text_limit), options.block_size)
    loader = DataLoader(text, batch_size=options.batch_size, shuffle=True, drop_last=True)

    trainer = build_trainer(options)
    trainer.fit(model, loader, ckpt_path="last" if options.resume else None)

    trainer.save_checkpoint(options.output / "final.ckpt", weights_only=False)
    if trainer.is_global_zero:
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        result = {
            "global_step": trainer.global_step,
            "loss": metrics["loss_step"],
            "metrics": metrics,
            "weights_sha256": sha256(model.state_dict()),
            "optimizer_sha256": sha256(trainer.optimizers[0].state_dict()),
        }
        (options.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
