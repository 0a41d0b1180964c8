"""Builds device.cpp with the system's compiler and torch's headers, once for each version of both."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
# No debugging symbols and little optimisation, for a fast build: it never runs for long.
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w")


class BuildError(RuntimeError):
    """The device cannot be built here."""


def find_compiler() -> str | None:
    """Return the C++ compiler, or None if there is none: ``CXX``, or one of the usual names."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++"))), None)


def built_library() -> Path:
    """Return the built library, which is kept in the environment.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    compiler = find_compiler()
    key = hashlib.sha256(f"{torch.__version__} {compiler} {FLAGS}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(sys.prefix) / "simulated_device"
    library = folder / f"device-{key}.so"
    if library.exists():
        return library
    if compiler is None:
        raise BuildError("no C++ compiler: install g++ or clang++, or name one in CXX")
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers may build it at the same time
        if not library.exists():
            _build(compiler, library)
    return library


def _build(compiler: str, library: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    built = library.with_suffix(".partial")
    done = subprocess.run(
        [
            *(compiler, *FLAGS, abi, "-isystem", str(include)),
            *("-isystem", str(include / "torch" / "csrc" / "api" / "include"), str(SOURCE), "-o", str(built)),
            *(f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BuildError(f"{compiler} cannot build {SOURCE}:\n{done.stderr[-4000:]}")
    built.replace(library)
