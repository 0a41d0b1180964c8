"""What a user installs: the metadata, the files of the wheel, and what importing costs."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DISTRIBUTION = "ckpt-plugins"
PACKAGES = ("ckpt_core", "ckpt_async", "lightning_ckpt", "accelerate_ckpt")
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "ckpt_core" / "__init__.py").read_text(), re.MULTILINE)[1]

# Packages that ckpt_core must work without: all except its five dependencies and theirs.
NOT_FOR_CORE = (
    "accelerate",
    "adlfs",
    "aiobotocore",
    "azure",
    "boto3",
    "botocore",
    "gcsfs",
    "jsonargparse",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "matplotlib",
    "obstore",
    "omegaconf",
    "pandas",
    "psutil",
    "pytorch_lightning",
    "s3fs",
    "safetensors",
    "sklearn",
    "torchdata",
    "torchmetrics",
    "transformers",
    "yaml",
)


@pytest.fixture(scope="module")
def metadata(unavailable) -> importlib.metadata.PackageMetadata:
    try:
        return importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        unavailable(f"{DISTRIBUTION} is not installed: make venv")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return a wheel built from a copy of the tree, because building writes next to the sources."""
    tree = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "."], cwd=tree, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (built,) = tree.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.mark.extended
def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    info = f"ckpt_plugins-{VERSION}.dist-info"
    assert {name for name in wheel.namelist() if not name.startswith(info)} == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= expected
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_version_is_the_same_everywhere(metadata, wheel: zipfile.ZipFile) -> None:
    assert metadata["Version"] == VERSION
    assert f"\nVersion: {VERSION}\n" in wheel.read(f"ckpt_plugins-{VERSION}.dist-info/METADATA").decode()
    for package in PACKAGES:
        module = importlib.import_module(package)
        assert getattr(module, "__version__", VERSION) == VERSION


def test_the_changelog_knows_what_is_not_released_yet() -> None:
    assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_licence(metadata) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


def test_only_the_five_dependencies_are_required(metadata) -> None:
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in required} == {"fsspec", "numpy", "stamina", "torch", "xxhash"}


@pytest.mark.parametrize("extra", ["lightning", "pytorch-lightning"])
def test_compromised_releases_of_lightning_are_refused(metadata, extra: str) -> None:
    marker = f'; extra == "{extra}"'
    (line,) = [line for line in metadata.get_all("Requires-Dist") if line.endswith(marker)]
    assert "!=2.6.2" in line
    assert "!=2.6.3" in line


def test_every_pin_is_exact() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    exact = r'[\w.-]+==[\w.]+(; python_version >= "3.11")?'
    assert [pin for pin in pins if not re.fullmatch(exact, pin)] == []


def test_the_console_scripts_work(metadata) -> None:
    scripts = importlib.metadata.distribution(DISTRIBUTION).entry_points.select(group="console_scripts")
    assert {script.name for script in scripts} == {"ckpt", "accelerate-ckpt"}
    assert all(callable(script.load()) for script in scripts)


def test_installing_it_adds_nothing_to_other_programs(metadata) -> None:
    points = importlib.metadata.distribution(DISTRIBUTION).entry_points
    assert {point.group for point in points} == {"console_scripts"}


@pytest.mark.extended_cells("pytorch_lightning")
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_that_does_not_use_it_is_as_without_it(run_script, metadata, package: str) -> None:
    done = run_script(
        f"""
        import io, pickle, sys, torch
        import {package} as pl
        from {package}.demos.boring_classes import BoringModel
        trainer = pl.Trainer(fast_dev_run=True, accelerator="cpu", barebones=False)
        model = BoringModel()
        trainer.fit(model)
        model.trainer = trainer
        torch.save(model, io.BytesIO())
        print(pickle.loads(pickle.dumps(trainer)).global_step)
        print([type(callback).__module__ for callback in trainer.callbacks if "lightning" not in type(callback).__module__])
        print(sorted(name for name in sys.modules if name.partition(".")[0] in {PACKAGES}))
        """
    )
    assert done.stdout.splitlines()[-3:] == ["1", "[]", "[]"]
    assert "ckpt" not in done.stdout + done.stderr


def test_importing_the_engine_imports_no_framework(run_script) -> None:
    done = run_script(
        f"""
        import sys
        import ckpt_core
        print([name for name in {NOT_FOR_CORE} if name in sys.modules])
        """
    )
    assert done.stdout == "[]\n"


@pytest.mark.extended
def test_importing_it_warns_of_nothing(run_script) -> None:
    done = run_script(
        """
        import importlib, pkgutil, warnings
        import accelerate, lightning.pytorch, transformers.trainer

        warnings.simplefilter("error")  # as a program is run with -W error, when its own imports are done
        for name in ("ckpt_core", "lightning_ckpt", "accelerate_ckpt", "ckpt_async"):
            for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
        print("done")
        """
    )
    assert done.stdout == "done\n"


def test_every_module_of_the_engine_works_with_its_five_dependencies_alone(run_script) -> None:
    done = run_script(
        f"""
        import importlib, pkgutil, sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {NOT_FOR_CORE}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Refuse())
        import ckpt_core

        names = [module.name for module in pkgutil.walk_packages(ckpt_core.__path__, "ckpt_core.")]
        for name in names:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        print("ckpt_core.errors" in names)
        """
    )
    assert done.stdout == "True\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_promises_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
