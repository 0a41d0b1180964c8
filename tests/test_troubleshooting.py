"""Each message that a user may see has an entry in docs/troubleshooting.md, and each entry has a message."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("ckpt_core", "lightning_ckpt", "accelerate_ckpt", "ckpt_async")
MOST_MESSAGES = 8  # that one entry may cover: one that fits more explains none
FEWEST_LETTERS = 8  # a text with fewer only passes another message on


def errors() -> set[str]:
    files = [ROOT / "ckpt_core" / "errors.py", *(ROOT / "ckpt_async").rglob("*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if node.name.endswith("Error")}


def text_of(node: ast.expr) -> str:
    """Return the text of a message, with … for each value put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:#x|[sd.f0-9]+)", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "…"


def all_messages() -> Iterator[tuple[str, str]]:
    """Yield place and text of each of our errors, each warning, and each message that the preflight returns."""
    ours = errors()
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if path.name == "preflight.py" and isinstance(node, ast.Return) and node.value is not None:
                # its caller warns with this text
                text = text_of(node.value.orelse if isinstance(node.value, ast.IfExp) else node.value)
            elif not isinstance(node, ast.Call) or not node.args:
                continue
            else:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name not in ours | {"warn", "warning", "tell_once"}:
                    continue
                text = text_of(node.args[-1 if name == "tell_once" else 0])
            if len(re.findall("[a-z]", text)) >= FEWEST_LETTERS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


@functools.cache
def messages() -> list[tuple[str, str]]:
    return list(all_messages())


def entries() -> list[str]:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    quoted = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    return [quote for quote in quoted if quote[:1].islower() or " " in quote]


def covers(entry: str, message: str) -> bool:
    return re.search(".*".join(map(re.escape, entry.split("…"))), message, re.DOTALL) is not None


def test_every_message_has_an_entry() -> None:
    quoted = entries()
    missing = [f"{place}: {text}" for place, text in messages() if not any(covers(entry, text) for entry in quoted)]
    assert missing == []


def test_every_entry_has_a_message() -> None:
    texts = [text for _, text in messages()]
    assert [entry for entry in entries() if not any(covers(entry, text) for text in texts)] == []


def test_no_entry_is_for_everything() -> None:
    texts = [text for _, text in messages()]
    assert [entry for entry in entries() if sum(covers(entry, text) for text in texts) > MOST_MESSAGES] == []
