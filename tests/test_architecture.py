"""The order of the modules: imports only go down, there is no circle of imports, and none is hidden in a string."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_public_names import ALSO_THERE, EXPORTED

ROOT = Path(__file__).parents[1]
PACKAGES = ("ckpt_core", "ckpt_async", "lightning_ckpt", "accelerate_ckpt")

# The modules of ckpt_core, top layer first. Those of one layer may import each other; docs/architecture.md explains the
# order.
LAYERS = (
    {"cli", "testing"},
    {"rehearsal"},
    {"interchange"},
    {"listeners"},
    {"options", "small_states", "gpu_check"},
    {"report"},
    {"checkpointer", "directory", "separate"},
    {"policies"},
    {"preemption", "resume", "survivors"},
    {"catalog"},
    {"tiers"},
    {"_pipeline"},
    {"ranks"},
    {"_commit"},
    {"recorder"},
    {"state"},
    {"_layouts", "pins", "preflight"},
    {"_plan"},
    {"storage"},
    {
        "_devices",
        "commit_time",
        "buffers",
        "geometry",
        "tree",
        "digest",
        "events",
        "errors",
        "option_checks",
        "paths",
        "process",
        "weights_only",
    },
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}

# The fsspec backends are extras: ckpt_core reaches them through fsspec alone.
THIRD_PARTY_OF_CORE = {"fsspec", "numpy", "stamina", "torch", "xxhash"}
# Packages of extras, which only this module of ckpt_core may import, where it uses them and if they are installed.
OPTIONAL_OF_MODULE = {
    "storage": {"aiobotocore", "azure", "botocore", "obstore"},
    "cli": {"tqdm"},
    "listeners": {"opentelemetry", "prometheus_client"},
}
FRAMEWORKS_OF = {
    "ckpt_async": set[str](),
    "lightning_ckpt": {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"},
    "accelerate_ckpt": {"accelerate", "transformers"},
}
# The other packages of ours that a package may import.
BELOW = {"ckpt_async": {"ckpt_core"}, "lightning_ckpt": {"ckpt_core", "ckpt_async"}, "accelerate_ckpt": {"ckpt_core"}}
# Plugins and asynchronous training may import neither storage nor anything private.
HIDDEN_FROM_PLUGINS = {"storage"}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_under(root: Path) -> dict[str, Path]:
    return {module_name(path, root): path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))}


def nodes_of(path: Path, words: str) -> Iterator[ast.AST]:
    """Yield the nodes of a file, or none if the regular expression matches nowhere: parsing all takes seconds."""
    text = path.read_text(encoding="utf-8")
    return ast.walk(ast.parse(text)) if re.search(words, text) else iter(())


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in nodes_of(path, "import") if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each module imported anywhere in a file: at the top, in functions, and for types only."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        else:
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
        name = inside.partition(".")[0]
        if package == "ckpt_core" and name and name not in LAYER_OF:
            problems.append(f"{path.relative_to(root)}: '{name}' has no layer")
            continue
        for line, target in imports_of(path, known):
            place = f"{path.relative_to(root)}:{line}"
            target_package, _, target_inside = target.partition(".")
            target_module = target_inside.partition(".")[0]
            if package == "ckpt_core":
                problems += core_problems(place, name, target_package, target_module)
            else:
                problems += plugin_problems(place, module, target_package, target_module, target)
    return list(dict.fromkeys(problems))  # several names of one import statement are one problem


def core_problems(place: str, name: str, target_package: str, target_module: str) -> list[str]:
    if target_package != "ckpt_core":
        if target_package in sys.stdlib_module_names | THIRD_PARTY_OF_CORE | OPTIONAL_OF_MODULE.get(name, set()):
            return []
        return [f"{place}: ckpt_core imports {target_package}"]
    if not name:
        return []  # ckpt_core/__init__.py imports from everywhere
    if not target_module:
        return [f"{place}: {name} imports ckpt_core itself"]
    if LAYER_OF.get(target_module, -1) < LAYER_OF[name]:
        return [f"{place}: {name} imports {target_module}, which is above it"]
    return []


def plugin_problems(place: str, module: str, target_package: str, target_module: str, target: str) -> list[str]:
    package = module.partition(".")[0]
    is_private = any(part.startswith("_") for part in target.split(".")[1:])
    is_hidden = target_module in HIDDEN_FROM_PLUGINS
    if target_package == "ckpt_core" and (is_hidden or is_private):
        return [f"{place}: {package} imports ckpt_core.{target_module}"]
    frameworks = set().union(*(names for other, names in FRAMEWORKS_OF.items() if other != package))
    foreign = frameworks | set(PACKAGES) - {package} - BELOW[package]
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
    """Return calls that import a module of ours by a string, which the checks of order and circles do not see."""
    found = []
    for path in modules_under(root).values():
        if path.name == "__init__.py":
            continue  # a package may load names when they are first used
        for node in nodes_of(path, "import_module|__import__"):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if called not in ("import_module", "__import__"):
                continue
            names = [part for argument in node.args for part in ast.walk(argument)]
            texts = [part.value for part in names if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            ours = any(text.partition(".")[0] in PACKAGES for text in texts)
            if ours or any(isinstance(part, ast.Name) and part.id in ("__name__", "__package__") for part in names):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    return found


def uses_of_devices(root: Path) -> list[str]:
    """Return places outside of ``_devices`` that ask which accelerator a tensor is on, or use one by name."""
    kinds = {"cuda", "xpu", "mps", "hpu", "npu", "mtia"}
    names = kinds | {"Stream", "Event", "accelerator", "get_device_module"}
    found = []
    for path in modules_under(root).values():
        if path.relative_to(root).parts[:2] == ("ckpt_core", "_devices"):
            continue
        for node in nodes_of(path, "|".join(names)):
            if isinstance(node, ast.Attribute):
                is_use = node.attr in {f"is_{kind}" for kind in kinds} or (
                    node.attr in names and ast.unparse(node.value) == "torch"
                )
            else:
                imported = _imported(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else []
                is_use = any(f"{name}.".startswith(f"torch.{used}.") for name in imported for used in names)
            if is_use:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    return found


def private_names_of_lightning(root: Path) -> list[str]:
    """Return places outside of ``lightning_ckpt/_private`` that use a private name of a Trainer, strategy or Fabric."""
    found = []
    for path in modules_under(root).values():
        package, folder = (*path.relative_to(root).parts, "")[:2]
        if package != "lightning_ckpt" or folder == "_private":
            continue
        for node in nodes_of(path, "trainer|strategy|fabric"):
            if isinstance(node, ast.Attribute):
                owner, name = node.value, node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                owner, name = node.args[0], str(getattr(node.args[1], "value", ""))  # if it is a literal
            else:
                continue
            of_lightning = ast.unparse(owner).rpartition(".")[2].strip("_") in ("trainer", "strategy", "fabric")
            if of_lightning and re.match(r"_(?!_|lightning_ckpt|ckpt)", name):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    return found


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]


def needless_lists(root: Path, public: set[str]) -> list[str]:
    """Return modules with an ``__all__`` although they are not public, and re-export no imported name."""
    found = []
    for module, path in modules_under(root).items():
        text = path.read_text(encoding="utf-8")
        if path.name == "__init__.py" or module in public or "__all__" not in text:
            continue
        tree = ast.parse(text)
        imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
        imported = {alias.asname or alias.name for alias in imports}
        lists = [
            node.value
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and "__all__" in ast.unparse(node).partition("=")[0]
        ]
        hands_on = any(name in imported for value in lists if value for name in ast.literal_eval(value))
        if lists and not hands_on:
            found.append(module)
    return found


def modules_in_the_docs() -> set[str]:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    names = re.findall(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+", "\n".join(page.read_text("utf-8") for page in pages))
    return {name.rsplit(".", count)[0] for name in names for count in range(name.count(".") + 1)}


def lost_in_the_page(root: Path, page: str) -> list[str]:
    """Return modules directly in a package that docs/architecture.md does not name, and names on it without a file."""
    named = {name for name in re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", page) if not name.startswith("tests/")}
    files = [path.relative_to(root).as_posix() for package in PACKAGES for path in (root / package).rglob("*.py")]
    modules = {"/".join(file.split("/")[:2]) + "/" * (file.count("/") > 1) for file in files}
    lost = {module for module in modules if "__" not in module and not {module, module.partition("/")[2]} & named}
    return sorted(lost | {name for name in named if not any(f"/{name}" in f"/{file}" for file in files)})


def test_all_packages_are_looked_at() -> None:
    assert {module.partition(".")[0] for module in modules_under(ROOT)} == set(PACKAGES)


def test_imports_only_go_down() -> None:
    assert direction_problems(ROOT) == []


def test_there_is_no_import_circle() -> None:
    assert circles(ROOT) == []


def test_no_import_is_hidden() -> None:
    assert hidden_imports(ROOT) == []


def test_the_page_on_the_architecture_names_every_module_and_no_other() -> None:
    assert lost_in_the_page(ROOT, (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")) == []


def test_a_module_that_the_page_lost_is_found(tmp_path: Path) -> None:
    for path in ("ckpt_core/tree.py", "ckpt_core/cli/parser.py", "lightning_ckpt/io.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert lost_in_the_page(tmp_path, "`tree.py`, `cli/`, `lightning_ckpt/io.py`, `cli/parser.py`") == []
    assert lost_in_the_page(tmp_path, "`tree.py`, `attic.py`") == ["attic.py", "ckpt_core/cli/", "lightning_ckpt/io.py"]


def test_one_module_knows_accelerators() -> None:
    assert uses_of_devices(ROOT) == []


def test_private_names_of_lightning_are_in_one_place() -> None:
    assert private_names_of_lightning(ROOT) == []


@pytest.mark.parametrize("source", ["self._trainer._connector.x()", 'getattr(trainer.strategy, "_model", None)'])
def test_a_private_name_of_lightning_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "lightning_ckpt" / "_private").mkdir(parents=True)
    (tmp_path / "lightning_ckpt" / "_private" / "loops.py").write_text(source)
    (tmp_path / "lightning_ckpt" / "io.py").write_text(f"x = self._trainer\n{source}\n")
    (found,) = private_names_of_lightning(tmp_path)
    assert found.startswith("lightning_ckpt/io.py:2: ")


def test_only_public_modules_list_their_names() -> None:
    assert needless_lists(ROOT, {*EXPORTED, *ALSO_THERE, *modules_in_the_docs()}) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "if tensor.is_cuda: pass",
        "import torch.cuda",
        "from torch import cuda",
        "torch.Stream()",
        "torch.accelerator.is_available()",
    ],
)
def test_a_use_of_an_accelerator_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "ckpt_core" / "_devices").mkdir(parents=True)
    (tmp_path / "ckpt_core" / "_devices" / "streams.py").write_text(source)
    (tmp_path / "ckpt_core" / "tree.py").write_text(f"x = 1\n{source}\n")
    (found,) = uses_of_devices(tmp_path)
    assert found.startswith("ckpt_core/tree.py:2: ")


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        (
            "ckpt_core/storage/local.py",
            "import ckpt_core._pipeline",
            "storage imports _pipeline, which is above it",
        ),
        ("ckpt_core/errors.py", "def f():\n    import ckpt_core.cli.main", "errors imports cli, which is above it"),
        ("ckpt_core/tree.py", "import ckpt_core", "tree imports ckpt_core itself"),
        ("ckpt_core/_pipeline/loading.py", "import lightning.pytorch as pl", "ckpt_core imports lightning"),
        ("ckpt_core/_pipeline/loading.py", "from transformers import Trainer", "ckpt_core imports transformers"),
        ("ckpt_core/attic.py", "", "'attic' has no layer"),
        ("lightning_ckpt/io.py", "from accelerate import Accelerator", "lightning_ckpt imports accelerate"),
        ("lightning_ckpt/io.py", "import accelerate_ckpt.x", "lightning_ckpt imports accelerate_ckpt"),
        ("lightning_ckpt/io.py", "import ckpt_core._layouts", "lightning_ckpt imports ckpt_core._layouts"),
        ("lightning_ckpt/io.py", "import ckpt_core.state._x", "lightning_ckpt imports ckpt_core.state"),
        ("ckpt_core/tree.py", "import ckpt_async.x", "ckpt_core imports ckpt_async"),
        ("ckpt_async/x.py", "import lightning", "ckpt_async imports lightning"),
        ("ckpt_async/x.py", "from ckpt_core._plan import Piece", "ckpt_async imports ckpt_core._plan"),
        ("ckpt_async/x.py", "import ckpt_core.storage", "ckpt_async imports ckpt_core.storage"),
        ("accelerate_ckpt/io.py", "import ckpt_async", "accelerate_ckpt imports ckpt_async"),
        ("accelerate_ckpt/io.py", "import pytorch_lightning", "accelerate_ckpt imports pytorch_lightning"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(tmp_path: Path, path: str, source: str, problem: str) -> None:
    for good in ("ckpt_core/_pipeline/writer.py", "ckpt_core/__init__.py", path):
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


def test_a_needless_list_of_names_is_found(tmp_path: Path) -> None:
    (tmp_path / "ckpt_core").mkdir()
    sources = {"tree": "x = 1", "__init__": "x = 1", "errors": "x = 1", "ranks": "from y import x"}
    for module, source in sources.items():
        (tmp_path / "ckpt_core" / f"{module}.py").write_text(f'{source}\n__all__ = ["x"]\n')
    assert needless_lists(tmp_path, {"ckpt_core.errors"}) == ["ckpt_core.tree"]


@pytest.mark.parametrize("source", ['import_module("lightning_ckpt.x")', 'importlib.import_module(f"{__name__}.x")'])
def test_a_hidden_import_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "lightning_ckpt").mkdir()
    (tmp_path / "lightning_ckpt" / "io.py").write_text(f"def f():\n    {source}\n")
    (found,) = hidden_imports(tmp_path)
    assert found.startswith("lightning_ckpt/io.py:2: ")
