"""Run the examples of Markdown pages: run every ``python`` block, and parse every ``yaml`` block.

Each Python block runs in an empty directory and in a process of its own, which is forked from one that has imported
the modules that take seconds. Comments directly above a block change that::

    <!-- continues -->          the block continues the Python block before it: they run as one script
    <!-- not run: reason -->    the block is only shown

Line numbers in a traceback are those of the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 180
#: Modules that are imported once for all scripts that contain a word; the first word that matches counts.
MODULES = {
    "lightning": ("lightning.pytorch", "lightning_ckpt"),
    "accelerate": ("torch._dynamo", "accelerate_ckpt._attach"),
    "ckpt_": ("torch._dynamo", "ckpt_core.checkpointer", "ckpt_core.directory"),
}
MISSPELT = {"py": "python", "python3": "python", "pycon": "python", "yml": "yaml"}
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+-]*)")
COMMENT = re.compile(r"^\s*<!--\s*(?P<text>.*?)\s*-->\s*$")


class PageError(Exception):
    """A page is not written the way this tool reads it."""


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block: where its first line is, counted from 1, its lines, and the comment above it."""

    page: Path
    line: int
    language: str
    lines: tuple[str, ...]
    comment: str

    @property
    def place(self) -> str:
        """The place as ``page:line``, which editors understand."""
        return f"{self.page}:{self.line}"

    @property
    def is_shown_only(self) -> bool:
        """Whether a comment ``not run`` excludes the block; its reason is not optional."""
        if not self.comment.startswith("not run"):
            return False
        if not re.fullmatch(r"not run: \S.*", self.comment):
            raise PageError(f"{self.place}: write the reason: <!-- not run: reason -->")
        return True


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        comment = COMMENT.match(lines[number - 1]) if number else None
        first = number + 1
        end = first
        while end < len(lines) and not lines[end].strip().startswith(opening["fence"]):
            end += 1
        if end == len(lines):
            raise PageError(f"{page}:{number + 1}: the block does not end")
        language = opening["language"].lower()
        if language in MISSPELT:
            raise PageError(f"{page}:{number + 1}: call the language {MISSPELT[language]}, not {opening['language']}")
        indent = len(opening["indent"])
        yield Block(
            page=page,
            line=first + 1,
            language=language,
            lines=tuple(line[indent:] if not line[:indent].strip() else line for line in lines[first:end]),
            comment=comment["text"] if comment else "",
        )
        number = end + 1


def scripts_of(blocks: list[Block]) -> list[tuple[Block, str]]:
    """Return the scripts that the Python blocks of a page make, each with its first block."""
    scripts: list[tuple[Block, list[str]]] = []
    can_continue = False
    for block in blocks:
        if block.language != "python":
            continue
        if block.is_shown_only:
            can_continue = False
        elif block.comment == "continues":
            if not can_continue:
                raise PageError(f"{block.place}: there is no block that runs before it to continue")
            _append_at_its_line(scripts[-1][1], block)
        else:
            scripts.append((block, []))
            _append_at_its_line(scripts[-1][1], block)
            can_continue = True
    return [(first, "\n".join(lines) + "\n") for first, lines in scripts]


def _append_at_its_line(script: list[str], block: Block) -> None:
    script.extend([""] * (block.line - 1 - len(script)))
    script.extend(block.lines)


def run(server: ForkServer, block: Block, script: str) -> str | None:
    """Run a script; return what went wrong, or None."""
    # The script is next to its working directory, so that the example starts in an empty one.
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        path = Path(folder) / f"{block.page.stem}_{block.line}.py"
        path.write_text(script, encoding="utf-8")
        cwd = Path(folder) / "cwd"
        cwd.mkdir()
        code = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
        done = server.run(code, [], cwd=cwd, environments=[environment()], timeout=TIMEOUT_SECONDS)
    if done.timed_out:
        return f"{block.place}: did not end within {TIMEOUT_SECONDS} s"
    if done.status != 0:
        return f"{block.place}: exited with status {done.status}\n{done.stdout}{done.stderr}"
    return None


def run_all(scripts: list[tuple[Block, str]]) -> list[str | None]:
    """Run the scripts, those of one framework one after the other; return what went wrong in each, or None."""
    kinds: dict[tuple[str, ...], list[tuple[Block, str]]] = {}
    for block, script in scripts:
        modules = next((modules for word, modules in MODULES.items() if word in script), ())
        kinds.setdefault(modules, []).append((block, script))

    def run_those_with(modules: tuple[str, ...]) -> list[str | None]:
        with tempfile.TemporaryDirectory(prefix="docs-") as folder:
            server = ForkServer(Path(folder), modules, environment())
            try:
                return [run(server, block, script) for block, script in kinds[modules]]
            finally:
                server.close()

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return [problem for problems in pool.map(run_those_with, kinds) for problem in problems]


def environment() -> dict[str, str]:
    """Return the environment variables of the scripts."""
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path}


def yaml_problem(block: Block) -> str | None:
    """Return why the block is not YAML, or None."""
    try:
        list(yaml.safe_load_all("\n".join(block.lines)))
    except yaml.YAMLError as error:
        return f"{block.place}: not YAML: {error}"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Check the pages named on the command line; return 1 if any of their examples fails."""
    parser = argparse.ArgumentParser(description="Run the examples of Markdown pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    pages: list[Path] = parser.parse_args(arguments).pages

    try:
        blocks = {page: list(blocks_of(page)) for page in pages}
        scripts = [script for page in pages for script in scripts_of(blocks[page])]
        yaml_blocks = [
            block for page in pages for block in blocks[page] if block.language == "yaml" and not block.is_shown_only
        ]
    except (PageError, OSError) as error:
        print(error, file=sys.stderr)
        return 1

    problems = [yaml_problem(block) for block in yaml_blocks]
    problems += run_all(scripts)
    failures = [problem for problem in problems if problem is not None]
    for failure in failures:
        print(failure, file=sys.stderr)
    print(
        f"examples of {len(pages)} pages: {len(scripts)} Python scripts run, {len(yaml_blocks)} YAML blocks parsed, "
        f"{len(failures)} failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
