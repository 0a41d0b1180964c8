"""The order of the modules: imports only go down, there is no circle, and none is hidden in a string."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ckpt_core", "lightning_ckpt", "accelerate_ckpt")

# Top floor first. Rooms of one floor may import each other; the order is explained in docs/architecture.md.
FLOORS = (
    {"cli"},
    {"interchange", "local_updates", "parameter_server"},
    {"checkpointer", "directory_checkpointer"},
    {"consistent_cut"},
    {"policies"},
    {"catalog"},
    {"tiers"},
    {"directory_writer"},
    {"writer", "reader"},
    {"commit"},
    {"advice", "snapshot"},
    {"plan"},
    {"state"},
    {"layouts"},
    {"storage"},
    {"at_exit", "awaited_paths", "commit_time", "memory", "parallel", "geometry", "tree", "digest", "events", "errors"},
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# The fsspec backends are extras: ckpt_core reaches them through fsspec alone.
THIRD_PARTY_OF_CORE = {"fsspec", "numpy", "stamina", "torch", "xxhash"}
# What only one room may import, where it is used and installed: clients that a user asks for by an extra.
OPTIONAL_OF_ROOM = {"storage": {"aiobotocore", "azure", "botocore", "obstore"}}
FRAMEWORKS_OF = {
    "lightning_ckpt": {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"},
    "accelerate_ckpt": {"accelerate", "transformers"},
}
# A plugin translates words: it knows neither file formats nor storage.
HIDDEN_FROM_PLUGINS = {"layouts", "plan", "storage"}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_under(root: Path) -> dict[str, Path]:
    return {module_name(path, root): path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))}


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and name of each module imported anywhere in the file: at the top, in functions and for types only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield node.lineno, submodule if submodule in known else node.module


def direction_problems(root: Path) -> list[str]:
    known = modules_under(root)
    problems = []
    for module, path in known.items():
        package, _, inside = module.partition(".")
        room = inside.partition(".")[0]
        if package == "ckpt_core" and room and room not in FLOOR_OF:
            problems.append(f"{path.relative_to(root)}: '{room}' has no floor")
            continue
        for line, target in imports_of(path, known):
            place = f"{path.relative_to(root)}:{line}"
            target_package, _, target_inside = target.partition(".")
            target_room = target_inside.partition(".")[0]
            if package == "ckpt_core":
                problems += core_problems(place, room, target_package, target_room)
            else:
                problems += plugin_problems(place, package, target_package, target_room, target)
    return list(dict.fromkeys(problems))  # several names of one import statement are one problem


def core_problems(place: str, room: str, target_package: str, target_room: str) -> list[str]:
    if target_package != "ckpt_core":
        if target_package in sys.stdlib_module_names | THIRD_PARTY_OF_CORE | OPTIONAL_OF_ROOM.get(room, set()):
            return []
        return [f"{place}: ckpt_core imports {target_package}"]
    if not room:
        return []  # ckpt_core/__init__.py is the roof
    if not target_room:
        return [f"{place}: {room} imports the roof, ckpt_core itself"]
    if FLOOR_OF.get(target_room, -1) < FLOOR_OF[room]:
        return [f"{place}: {room} imports {target_room}, which is above it"]
    return []


def plugin_problems(place: str, package: str, target_package: str, target_room: str, target: str) -> list[str]:
    is_private = any(part.startswith("_") for part in target.split(".")[1:])
    if target_package == "ckpt_core" and (target_room in HIDDEN_FROM_PLUGINS or is_private):
        return [f"{place}: {package} imports ckpt_core.{target_room}"]
    foreign = set().union(*({other, *names} for other, names in FRAMEWORKS_OF.items() if other != package))
    return [f"{place}: {package} imports {target_package}"] if target_package in foreign else []


def circles(root: Path) -> list[str]:
    known = modules_under(root)
    graph = {
        module: sorted({target for _, target in imports_of(path, known) if target in known and target != module})
        for module, path in known.items()
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for target in graph[module]:
                visit(target, [*trail, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found


def hidden_imports(root: Path) -> list[str]:
    """Calls that import a module of ours by its name as text, which neither the order nor the circles would show."""
    found = []
    for path in modules_under(root).values():
        if path.name == "__init__.py":
            continue  # names that a package loads when they are first used
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if called not in ("import_module", "__import__"):
                continue
            names = [part for argument in node.args for part in ast.walk(argument)]
            texts = [part.value for part in names if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            ours = any(text.partition(".")[0] in PACKAGES for text in texts)
            if ours or any(isinstance(part, ast.Name) and part.id in ("__name__", "__package__") for part in names):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_all_three_packages_are_looked_at() -> None:
    assert {module.partition(".")[0] for module in modules_under(ROOT)} == set(PACKAGES)


def test_imports_only_go_down() -> None:
    assert direction_problems(ROOT) == []


def test_there_is_no_import_circle() -> None:
    assert circles(ROOT) == []


def test_no_import_is_hidden() -> None:
    assert hidden_imports(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("ckpt_core/storage/local.py", "from ckpt_core import writer", "storage imports writer, which is above it"),
        ("ckpt_core/errors.py", "def f():\n    import ckpt_core.cli.main", "errors imports cli, which is above it"),
        ("ckpt_core/tree.py", "import ckpt_core", "tree imports the roof, ckpt_core itself"),
        ("ckpt_core/reader.py", "import lightning.pytorch as pl", "ckpt_core imports lightning"),
        ("ckpt_core/reader.py", "from transformers import Trainer", "ckpt_core imports transformers"),
        ("ckpt_core/attic.py", "", "'attic' has no floor"),
        ("lightning_ckpt/io.py", "from accelerate import Accelerator", "lightning_ckpt imports accelerate"),
        ("lightning_ckpt/io.py", "import accelerate_ckpt.x", "lightning_ckpt imports accelerate_ckpt"),
        ("lightning_ckpt/io.py", "import ckpt_core.layouts", "lightning_ckpt imports ckpt_core.layouts"),
        ("lightning_ckpt/io.py", "import ckpt_core.state._x", "lightning_ckpt imports ckpt_core.state"),
        ("accelerate_ckpt/io.py", "import pytorch_lightning", "accelerate_ckpt imports pytorch_lightning"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(tmp_path: Path, path: str, source: str, problem: str) -> None:
    for good in ("ckpt_core/writer.py", "ckpt_core/__init__.py", path):
        (tmp_path / good).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / good).write_text("from ckpt_core.errors import CheckpointError\nimport torch.nn\n")
    (tmp_path / path).write_text(source)
    problems = direction_problems(tmp_path)
    assert len(problems) == 1
    assert problems[0].startswith(path)
    assert problems[0].endswith(problem)


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "ckpt_core").mkdir()
    for module, target in {"tree": "digest", "digest": "events", "events": "tree"}.items():
        (tmp_path / "ckpt_core" / f"{module}.py").write_text(f"from ckpt_core import {target}\n")
    assert circles(tmp_path) == ["ckpt_core.digest -> ckpt_core.events -> ckpt_core.tree -> ckpt_core.digest"]


@pytest.mark.parametrize("source", ['import_module("lightning_ckpt.x")', 'importlib.import_module(f"{__name__}.x")'])
def test_a_hidden_import_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "lightning_ckpt").mkdir()
    (tmp_path / "lightning_ckpt" / "io.py").write_text(f"def f():\n    {source}\n")
    (found,) = hidden_imports(tmp_path)
    assert found.startswith("lightning_ckpt/io.py:2: ")
