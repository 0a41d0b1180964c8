"""The processes of a rehearsal end with the process that started them, however that one ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REHEARSES = """
import os, sys
from ckpt_core.rehearsal import rehearse

ENDS = '''
import os, pathlib, signal, time
held = os.open("held", os.O_WRONLY)
pathlib.Path("pid").write_text(str(os.getpid()))
os.kill({parent}, signal.{how})
time.sleep(600)
'''
rehearse([sys.executable, "-c", ENDS.format(parent=os.getpid(), how=sys.argv[1])], steps=1)
"""


@pytest.mark.extended_cells("SIGTERM")
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_rehearsed_process_ends_with_the_one_that_started_it(tmp_path: Path, how: str) -> None:
    os.mkfifo(tmp_path / "held")
    # ends when no process has the pipe open for writing any more
    waits = [sys.executable, "-c", "print(open('held').read(), end='')"]
    with (
        subprocess.Popen(waits, cwd=tmp_path, stdout=subprocess.PIPE) as reader,
        subprocess.Popen([sys.executable, "-c", REHEARSES, how], cwd=tmp_path) as rehearses,
    ):
        try:
            assert rehearses.wait(280) == -getattr(signal, how)
            assert reader.communicate(timeout=280) == (b"", None)
        finally:
            rehearses.kill()
            reader.kill()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
