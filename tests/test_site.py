"""The documentation's site builds, and its reference shows names instead of the markup of docstrings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.extended
def test_the_reference_shows_names_and_not_the_markup_of_docstrings(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(build, check=False, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "index.html").read_text()
    assert "<code>ckpt_core.resume.ResumePoint</code>" in page
    assert re.findall(r":[a-z]+:\s*<code>[^<]*", page) == []
