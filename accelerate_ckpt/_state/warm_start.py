"""``warm_start``: loads a checkpoint into prepared models that differ from the saved ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core.interchange import LoadReport, load_into
from ckpt_core.state.kinds import indexed


def warm_start(
    accelerator: Any,
    path: str | os.PathLike[str],
    *,
    rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None,
    partial: bool = True,
    strict: bool = True,
    optimizers: bool = False,
    part: str | None = None,
    weights_only: bool | None = None,
    storage_options: dict[str, Any] | None = None,
) -> list[LoadReport]:
    """Load weights, and optimizer state that still fits, into what an Accelerator has prepared; on all ranks.

    Use it if the model has changed (other names, other heads) or the weights are from another program; for the same
    model, use ``load_state``. Step, data position and random generators stay as they are: this starts a new run.

    Args:
        accelerator: The Accelerator, attached or not.
        path: Path or URL, of any layout (:func:`ckpt_core.load_into`).
        rename: Maps saved names to names in the model: ``{"backbone.": "encoder."}``, or a function.
        partial: Take what fits; False refuses other shapes.
        strict: With ``partial=False``, refuse missing and unexpected names, too.
        optimizers: Whether to take optimizer state for the parameters that still fit; of a single model.
        part: The key of the model, if it is not where Accelerate puts it.
        weights_only: As for ``torch.load``.
        storage_options: Passed to fsspec for a URL.

    Returns:
        For each model, what was taken, skipped and new.

    Raises:
        CheckpointError: The checkpoint does not fit, is missing or damaged.

    Example::

        model, optimizer = accelerator.prepare(model, optimizer)
        (report,) = warm_start(accelerator, "pretrained", rename={"head.": None})
        accelerator.print(report)
    """
    models = [accelerator.unwrap_model(model) for model in accelerator._models]
    wanted = [each.optimizer for each in accelerator._optimizers] if optimizers and len(models) == 1 else []
    return [
        load_into(
            path,
            model,
            optimizers=wanted,
            rename=rename,
            partial=partial,
            strict=strict,
            part=indexed("model", index) if part is None and index else part,
            weights_only=weights_only,
            storage_options=storage_options,
        )
        for index, model in enumerate(models)
    ]
