"""``WarmStart``: a callback that starts a fit from those weights and optimizer states of a checkpoint that fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core.interchange import LoadReport, load_into
from lightning_ckpt._bases import CallbackBase
from lightning_ckpt._report import announce


class WarmStart(CallbackBase):
    """Loads a checkpoint into the model at the start of a fit that resumes nothing, and reports what was taken.

    Use it if the model has changed (other names, other heads) or the weights are from another program. For the same
    model, pass ``ckpt_path`` to ``trainer.fit``. A fit that resumes (``ckpt_path``, ``resume="auto"``) is left alone,
    so that an interrupted fine-tuning continues from its own checkpoints.

    Args:
        path: Path or URL, of any layout (:func:`ckpt_core.load_into`).
        rename: Maps saved names to names in the model: ``{"backbone.": "encoder."}``, or a function.
        partial: Take what fits; False refuses other shapes.
        strict: With ``partial=False``, also refuse missing and unexpected names.
        optimizers: Whether to take optimizer state for the parameters that still fit.
        part: The key of the model, if it is not where Lightning puts it.
        weights_only: As for ``torch.load``.
        storage_options: Passed to fsspec for a URL.

    Attributes:
        report: What the last fit took, skipped and found new; None if it resumed.

    Example::

        trainer = Trainer(callbacks=[WarmStart("pretrained.ckpt", rename={"head.": None})])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None,
        partial: bool = True,
        strict: bool = True,
        optimizers: bool = False,
        part: str | None = None,
        weights_only: bool | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.optimizers = optimizers
        self.report: LoadReport | None = None
        self._settings: dict[str, Any] = {"rename": rename, "partial": partial, "strict": strict, "part": part}
        self._settings |= {"weights_only": weights_only, "storage_options": storage_options}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.report = None
        if trainer.ckpt_path is not None:
            return
        optimizers = trainer.optimizers if self.optimizers else ()
        self.report = load_into(self.path, pl_module, optimizers=optimizers, **self._settings)
        announce(trainer, f"started from {self.report}")
