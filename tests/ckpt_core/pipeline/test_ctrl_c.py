"""Ctrl-C at every moment of a save: nothing is left behind, and the next save works."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, awaited_paths, verify
from tests.support.interrupting import at_every_moment

FILES = {
    "sync": ("storage/local.py", "_pipeline/writer.py", "_pipeline/save.py", "_pipeline/file_save.py"),
    "async": ("_pipeline/save.py", "_pipeline/jobs.py", "_pipeline/buffer_pool.py", "_pipeline/staging.py"),
}


@pytest.mark.parametrize("strategy", FILES)
def test_ctrl_c_at_any_line_of_a_save(strategy: Any, tmp_path: Path) -> None:
    where = ""

    def interrupt() -> None:
        nonlocal where
        frame = sys._getframe()
        while not frame.f_code.co_filename.endswith(FILES[strategy]):
            assert frame.f_back is not None
            frame = frame.f_back
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        # A signal is not handled between the last line of a block and the end of its lock, nor at a bare ``try``, where lines are seen, too.
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:")):
            raise KeyboardInterrupt

    interrupted = 0
    for number, run in enumerate(at_every_moment(FILES[strategy], interrupt, opcodes=False)):
        directory = tmp_path / str(number)
        directory.mkdir()
        checkpointer = Checkpointer(strategy=strategy)
        try:
            run(lambda: checkpointer.save({"w": torch.ones(3)}, directory / "a"))  # noqa: B023
        except KeyboardInterrupt:
            interrupted += 1

        def save_again() -> None:
            checkpointer.save({"w": torch.zeros(3)}, directory / "b")  # noqa: B023
            checkpointer.close()  # noqa: B023

        again = threading.Thread(target=save_again, daemon=True)
        again.start()
        again.join(60.0)
        assert not again.is_alive(), f"the next save waits for ever after Ctrl-C at {where}"
        assert verify(directory / "b"), where
        assert set(os.listdir(directory)) <= {"a", "b"}, where
        assert not awaited_paths._saves, where
    assert interrupted > 50
