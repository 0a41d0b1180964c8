"""Decide whether a class or a file belongs to the user, or to Python, a library or these packages."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import torch

# Libraries, and packages of some, whose objects hold no training state, or one that is captured in another place.
_NAMES = """
    PIL _io _thread _weakref accelerate accelerate_ckpt aim asyncio boto3 botocore builtins ckpt_async ckpt_core
    clearml collections comet_ml concurrent contextlib ctypes datetime decimal diffusers.pipelines
    diffusers.schedulers dvclive enum fsspec h5py importlib io itertools kornia lightning lightning_ckpt
    lightning_fabric lmdb logging loguru matplotlib mlflow multiprocessing neptune numpy pandas pathlib pyarrow pydantic
    pytorch_lightning queue re rich s3fs selectors sentence_transformers socket sqlite3 ssl subprocess swanlab
    tensorboard tensorboardX threading tokenizers torch torchmetrics tqdm trackio transformers typing wandb weakref
    zoneinfo
"""
_LIBRARIES = frozenset(_NAMES.split())
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OTHERS = (
    os.path.dirname(os.__file__) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    *(os.path.join(_OURS, name, "") for name in ("ckpt_core", "ckpt_async", "lightning_ckpt", "accelerate_ckpt")),
)


def is_library(kind: type) -> bool:
    """Return whether a class belongs to a known library whose objects need not be inspected."""
    return is_librarys_module(kind.__module__)


def is_librarys_module(name: object) -> bool:
    """Return whether a module name belongs to one of those libraries."""
    return isinstance(name, str) and not _LIBRARIES.isdisjoint((name.partition(".")[0], ".".join(name.split(".")[:2])))


@functools.cache
def is_users_file(file: str | None) -> bool:
    """Return whether a source file is neither installed, nor Python's, nor ours; False for code without a file."""
    if not file or file.startswith("<"):
        return False
    return not any(part in file for part in _INSTALLED) and not os.path.abspath(file).startswith(_OTHERS)


@functools.lru_cache(maxsize=256)
def place_of(code: Any) -> tuple[str, int] | None:
    """Return file and line of a class or function, parsing its whole file; None if it has no source."""
    try:
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return None
    return None if file is None else (file, line)


def is_users_class(kind: type) -> bool:
    """Return whether a class is defined in a user's file, or in a ``__main__`` that has no file."""
    try:
        return is_users_file(inspect.getsourcefile(kind))
    except (OSError, TypeError):
        return kind.__module__ == "__main__"
