"""A training script for the tests of exact resume: trains, writes what happened as JSON, or is killed after a save.

Usage: exact_script.py SPECIFICATION.json; each rank writes RESULT.<rank>.json. The specification::

    {"options": {...}, "trainer": {...}, "seed": 1, "save": ["hook", count] | null, "kill": true, "checkpoint": "path",
     "resume": false, "result": "path", "io": "stock" | "module:Class"}
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)

import lightning.pytorch as pl
import torch

from tests.lightning.exact_cases import Model, SaveAt, make_trainer, outcome


def die() -> None:
    """Kill this process and, from rank 0, its children too, as losing the machine would."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        os.killpg(os.getpgid(0), signal.SIGKILL)
    time.sleep(60)


def checkpoint_io(name: str) -> list[Any]:
    if name == "stock":
        return []
    module, _, attribute = name.partition(":")
    return [getattr(importlib.import_module(module), attribute)()]


def main(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(spec["seed"], verbose=False)
    model = Model(spec["options"])
    save = SaveAt(*spec["save"], Path(spec["checkpoint"]), die if spec["kill"] else None) if spec["save"] else None
    directory = Path(spec["result"]).parent
    plugins = checkpoint_io(spec["io"])
    trainer = make_trainer(directory, [save] if save else [], plugins=plugins, **spec["trainer"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, ckpt_path=spec["checkpoint"] if spec["resume"] else None)
    found = outcome(trainer, model)
    result = {
        "whole": dataclasses.asdict(found),
        "after_save": dataclasses.asdict(found.after(save.seen, save.rows)) if save else None,
        "warnings": [str(w.message) for w in caught if "not exact" in str(w.message)],
    }
    path = Path(f"{spec['result']}.{trainer.global_rank}.json")
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
