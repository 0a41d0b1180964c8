"""Find lines of Markdown and Python that are too long; tables, code blocks and addresses may be longer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COLUMNS = 120
SCRIPTS = ("tests/", "benchmarks/")  # these contain long scripts and tables


def long_lines(path: Path) -> Iterator[int]:
    """Yield the numbers of the lines of ``path`` that could be shorter."""
    in_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if path.suffix == ".md" and line.lstrip().startswith("```"):
            in_code = not in_code
        is_table = path.suffix == ".md" and (in_code or line.lstrip().startswith("|"))
        if len(line) > COLUMNS and not is_table and " " in line.strip()[:COLUMNS]:
            yield number


def main(names: list[str]) -> int:
    """Print the long lines of the files ``names``, by default of all tracked files outside of ``SCRIPTS``."""
    if not names:
        done = subprocess.run(["git", "ls-files", "*.md", "*.py"], check=True, capture_output=True, text=True)
        names = [name for name in done.stdout.splitlines() if not name.startswith(SCRIPTS) and Path(name).is_file()]
    places = [f"{name}:{number}" for name in names for number in long_lines(Path(name))]
    for place in places:
        print(f"{place}: longer than {COLUMNS} columns")
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
