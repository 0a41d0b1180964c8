"""Features that only newer versions of Lightning have."""

from __future__ import annotations

import inspect

import pytest
from lightning.pytorch import callbacks

#: Whether ``save_last`` saves at the end of each epoch, and not only when something else was saved.
SAVES_LAST_AT_EPOCH_END = "_last_global_step_saved" not in inspect.getsource(
    callbacks.ModelCheckpoint.on_train_epoch_end
)
#: Whether pruning with the lottery ticket hypothesis goes back to the first weights; the copy of 2.5.0 has no effect.
LOTTERY_GOES_BACK = "_orig" in inspect.getsource(callbacks.ModelPruning._copy_param)
HAS_SAVE_ON_EXCEPTION = "save_on_exception" in inspect.signature(callbacks.ModelCheckpoint).parameters


def needs_save_on_exception() -> None:
    """Skip the test where ``ModelCheckpoint`` has no ``save_on_exception``."""
    if not HAS_SAVE_ON_EXCEPTION:
        pytest.skip("save_on_exception is there since Lightning 2.5.6")


def needs_weight_averaging() -> None:
    """Skip the test where there is no ``EMAWeightAveraging``."""
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("EMAWeightAveraging is there since Lightning 2.6")
