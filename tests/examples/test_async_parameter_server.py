"""The example of the parameter servers: the cut is right, the naive way is not, and there is a picture of it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "async_parameter_server" / "run.py"

pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_the_cut_is_right_and_the_naive_way_is_not(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--output", str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the naive way is wrong; the cut is right" in done.stdout

    found = json.loads((output / "summary.json").read_text())
    cut = {int(stream): count for stream, count in found["cut"].items()}
    assert 0 < sum(cut.values()) < 9, "it was taken on the way"
    expected = [int(cut[number % 3] > number // 3) for number in range(9)]
    assert [counts for _, *counts in found["at_cut"]] == [expected, expected]
    assert [counts for _, *counts in found["at_end"]] == [[1] * 9] * 2
    assert any(count != 1 for _, *counts in found["naive"] for count in counts)
    for stream, count in cut.items():
        assert f"stream {stream} resumes at batch {count + 1}" in done.stdout

    picture = (output / "picture.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 1000 and height > 500
    page = (output / "page.html").read_text()
    assert "<svg" in page and "Data-9" in page and "SIGKILL" in page
    assert "src=" not in page and "<link" not in page and "@import" not in page, "nothing from elsewhere"
