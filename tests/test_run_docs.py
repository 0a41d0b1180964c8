"""``tools/run_docs.py`` fails on examples that do not work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ckpt_core.preemption import EXIT_NOTICE, exit_status

TOOL = Path(__file__).parents[1] / "tools" / "run_docs.py"


@pytest.fixture
def check(tmp_path: Path):
    def check_page(text: str) -> subprocess.CompletedProcess[str]:
        page = tmp_path / "page.md"
        page.write_text(text)
        return subprocess.run(
            [sys.executable, TOOL, page], check=False, capture_output=True, text=True, timeout=280, cwd=tmp_path
        )

    return check_page


def test_examples_that_work(check) -> None:
    done = check(
        """
```python
import os
assert os.listdir() == []
value = 1
```
Text, and a block that continues:

<!-- continues -->
```python
assert value == 1
open("left", "w").close()
```
1. In a list, in a directory of its own:
   ```python
   import os
   if os.listdir() == []:
       assert "value" not in globals()
   else:
       raise AssertionError(os.listdir())
   ```
<!-- not run: needs a cluster -->
```python
raise AssertionError
```
```yaml
trainer: {plugins: []}
```
```text
not: [python
```
"""
    )
    assert done.stderr == ""
    assert done.stdout == "examples of 1 pages: 2 Python scripts run, 1 YAML blocks parsed, 0 failed\n"
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("page", "message"),
    [
        pytest.param("\n\n```python\nx = 1\nassert x == 2\n```\n", "line 5", id="assertion"),
        pytest.param("```yaml\na: [\n```\n", "page.md:2: not YAML", id="yaml"),
        pytest.param("```python\nx = 1\n", "page.md:1: the block does not end", id="open"),
        pytest.param("<!-- continues -->\n```python\n```\n", "page.md:3: there is no block", id="continues-nothing"),
        pytest.param("<!-- not run: -->\n```python\n```\n", "page.md:3: write the reason", id="no-reason"),
        pytest.param("```py\nx\n```\n", "page.md:1: call the language python, not py", id="misspelt"),
        pytest.param("```python\nx = 1\n```\n\n```python\nx\n```\n", "name 'x' is not defined", id="no-comment"),
    ],
)
def test_examples_that_do_not_work(check, page: str, message: str) -> None:
    done = check(page)
    assert message in done.stderr
    assert done.returncode == 1


def test_a_page_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, TOOL, tmp_path / "none.md"], check=False, capture_output=True, text=True, timeout=280
    )
    assert "none.md" in done.stderr
    assert done.returncode == 1


def test_exit_codes_of_a_kubernetes_job_are_in_order() -> None:
    page = (TOOL.parents[1] / "docs" / "unattended.md").read_text(encoding="utf-8")
    job = next(block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "kind: Job" in block)
    rules = yaml.safe_load(job)["spec"]["podFailurePolicy"]["rules"]
    (codes,) = (rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule)
    assert codes == sorted({exit_status(["SIGTERM"]), EXIT_NOTICE}), "Kubernetes refuses any other order"
