"""A LightningCLI program; checkpointing is chosen by its configuration alone.

    python main.py fit --config ../../configs/lightning/plugins.yaml
    python main.py fit --config ../../configs/lightning/plugins.yaml --ckpt_path last    # after a crash

The text is real and needs no download: the source of Python's own standard library.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 128  # ASCII: every character is its own token


class NextCharacter(L.LightningModule):
    """Predicts a character from the ones before it.

    Args:
        context: Number of characters it sees.
        width: Size of the hidden layer.
        dropout: Probability of dropping a hidden value.
        learning_rate: For AdamW.
    """

    def __init__(self, context: int = 16, width: int = 64, dropout: float = 0.1, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Embedding(VOCABULARY, 16),
            nn.Flatten(),
            nn.Linear(16 * context, width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(width, VOCABULARY),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        characters, following = batch
        loss = F.cross_entropy(self.net(characters), following)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class StandardLibraryText(L.LightningDataModule):
    """Every window of the standard library's text.

    Args:
        context: Number of characters in a window.
        batch_size: Windows per process and batch.
        characters: How much text to read.
    """

    def __init__(self, context: int = 16, batch_size: int = 32, characters: int = 20_000) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.characters = characters

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        text = bytearray()
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += source.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
            if len(text) >= self.characters:
                break
        windows = torch.frombuffer(text[: self.characters], dtype=torch.uint8).long().unfold(0, self.context + 1, 1)
        dataset = TensorDataset(windows[:, :-1], windows[:, -1])
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True)


if __name__ == "__main__":
    LightningCLI(NextCharacter, StandardLibraryText)
