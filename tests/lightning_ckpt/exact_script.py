"""Train in fresh processes, for the tests of exact resume.

``exact_script.py`` reads one specification per line from its standard input. For each it forks one process per rank
from itself, which has imported everything and trained nothing, and answers with the exit statuses of the ranks. Each
rank writes ``RESULT.<rank>.json``, or is killed right after a save. A specification::

    {"options": {...}, "trainer": {...}, "seed": 1, "save": ["hook", count] | null, "kill": true, "checkpoint": "path",
     "resume": false, "result": "path", "io": "stock" | "module:Class", "port": 29500}
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.lightning_ckpt.exact_cases import Model, SaveAt, make_trainer, outcome
from tests.support.forking import fork_rank, rank_variables, serve


def die(saved: Path) -> None:
    """Wait for the checkpoint, then kill all ranks and their workers, as the loss of the machine would."""
    while not saved.exists():
        time.sleep(0.01)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def checkpoint_io(name: str) -> list[Any]:
    if name == "stock":
        return []
    module, _, attribute = name.partition(":")
    return [getattr(importlib.import_module(module), attribute)()]


def main(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(spec["seed"], verbose=False)
    model = Model(spec["options"])
    saved = Path(spec["checkpoint"])
    after_save = functools.partial(die, saved) if spec["kill"] else None
    save = SaveAt(*spec["save"], saved, after_save) if spec["save"] else None
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
        "warnings": [str(w.message) for w in caught if "exact" in str(w.message)],
    }
    path = Path(f"{spec['result']}.{trainer.global_rank}.json")
    path.write_text(json.dumps(result))


def run(spec: dict[str, Any]) -> list[int]:
    """Run the ranks and return their exit statuses."""
    processes: list[int] = []
    for rank in range(spec["ranks"]):
        log, group = f"{spec['result']}.{rank}.log", processes[0] if processes else 0
        body = functools.partial(main, spec)
        processes.append(fork_rank(body, rank_variables(rank, spec["ranks"], spec["port"]), log, group))
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


if __name__ == "__main__":
    serve(run)
