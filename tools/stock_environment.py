"""Makes an environment like the current one, without this project: being installed can change programs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

DISTRIBUTION = "ckpt-plugins"
_CHECK = f"""
import importlib.metadata, importlib.util
print([name for name in ("ckpt_core", "lightning_ckpt", "accelerate_ckpt") if importlib.util.find_spec(name)])
print([found.name for found in importlib.metadata.distributions() if found.name == {DISTRIBUTION!r}])
"""


class StockEnvironmentError(Exception):
    """The environment would contain this project."""


def make_stock_environment(folder: Path) -> Path:
    """Make an environment with the packages of this one, by links, and without this project.

    Args:
        folder: Where to make it; an existing folder is replaced.

    Returns:
        The path of its Python.

    Raises:
        StockEnvironmentError: This project can be imported there.
    """
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    installed = Path(sysconfig.get_paths()["purelib"])
    ours = _own_files(installed)
    for path in installed.iterdir():
        if path.name not in ours and path.name != "__pycache__":
            os.symlink(path, site / path.name)
    python = folder / "bin" / "python"
    # from the folder itself: the current directory is on the path
    done = subprocess.run([python, "-c", _CHECK], cwd=folder, check=True, capture_output=True, text=True)
    if done.stdout.split() != ["[]", "[]"]:
        raise StockEnvironmentError(f"{folder} has this project: {done.stdout}")
    return python


def _own_files(installed: Path) -> set[str]:
    """Return the names directly in ``site-packages`` that belong to this project, installed editable or not."""
    files = importlib.metadata.distribution(DISTRIBUTION).files or ()
    return {path.parts[0] for path in files} | {path.name for path in installed.glob("ckpt_plugins-*")}
