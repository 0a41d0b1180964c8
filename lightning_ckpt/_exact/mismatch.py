"""Raises one error for a checkpoint of another model: the file, the first tensors that differ, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core.errors import StateMismatchError
from ckpt_core.state.kinds import Kind
from lightning_ckpt._exact.parameter_groups import restore_groups
from lightning_ckpt._exact.state import KEY
from lightning_ckpt._private.replacing import replace

_SHOWN = 5
_WRAPPED = ("load_model_state_dict", "load_optimizer_state_dict")


def name_mismatches(trainer: Any) -> None:
    """Make a Trainer's strategy raise :class:`StateMismatchError` if a checkpoint does not fit the model.

    Lightning loads the model before it calls any callback, so the strategy's public methods that load are wrapped.
    """
    unwrap(trainer)
    strategy = trainer.strategy
    load_model, load_optimizers = (getattr(strategy, name) for name in _WRAPPED)

    def load_model_state_dict(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        try:
            load_model(checkpoint, strict=strict)
        except StateMismatchError:
            raise
        except RuntimeError as error:
            saved = checkpoint.get("state_dict", {})
            found = _differences(saved, trainer.lightning_module)
            raise StateMismatchError(
                f"the checkpoint is of another model: {'; '.join(found[:_SHOWN]) or error}"
                + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""),
                path=_path(trainer),
                key="state_dict",
                remedy=_remedy(saved, trainer.lightning_module.state_dict()),
            ) from error

    def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
        shared = checkpoint.get(KEY, {}).get(Kind.REPLICATED.value, {})
        restore_groups(trainer, shared.get("groups"), checkpoint.get("optimizer_states", ()))
        try:
            load_optimizers(checkpoint)
        except StateMismatchError:
            raise
        except (ValueError, KeyError, IndexError) as error:
            raise StateMismatchError(
                f"the checkpoint's optimizers do not fit those of this run: {error}",
                path=_path(trainer),
                key="optimizer_states",
                remedy="return the same optimizers over the same parameters from configure_optimizers, or start a new "
                f"fit with what still fits: callbacks=[lightning_ckpt.WarmStart({_path(trainer)!r})]",
            ) from error

    for function in (load_model_state_dict, load_optimizer_state_dict):
        replace(strategy, function.__name__, function)


def unwrap(trainer: Any) -> None:
    """Leave the strategy as it was."""
    for name in _WRAPPED:
        vars(trainer.strategy).pop(name, None)


def _path(trainer: Any) -> str | None:
    return None if trainer.ckpt_path is None else str(trainer.ckpt_path)


def _remedy(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    for name in own:
        if f"{name}_orig" in saved and f"{name}_mask" in saved:
            return (
                "the parameters were pruned after the model was built: prune them before it is loaded, as by "
                "torch.nn.utils.prune.identity(module, name) in LightningModule.setup"
            )
        owner, _, tensor = name.rpartition(".")
        if any(key.startswith(f"{owner}.parametrizations.{tensor}.".lstrip(".")) for key in saved):
            return (
                "register the parametrizations that it was saved with before it is loaded, as in LightningModule.setup"
            )
    if any(
        getattr(tensor, "shape", None) != getattr(saved.get(name, tensor), "shape", None)
        for name, tensor in own.items()
    ):
        return "build the model with the settings it was saved with"
    return (
        "build the model with the settings it was saved with, or load the tensors that both have with "
        "LightningModule.strict_loading = False"
    )


def _differences(saved: Mapping[str, Any], module: Any) -> list[str]:
    own = module.state_dict()
    missing = [f"{name} is missing" for name in own if name not in saved]
    unexpected = [f"{name} is not in the model" for name in saved if name not in own]
    shapes = [
        f"{name} has shape {list(saved[name].shape)}, the model's {list(tensor.shape)}"
        for name, tensor in own.items()
        if name in saved and hasattr(saved[name], "shape") and saved[name].shape != tensor.shape
    ]
    return shapes + missing + unexpected
