"""Use checkpoints as scripts do right after ``save_state``: ``awaited_script.py DIRECTORY [CASE...]``; prints JSON."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors import safe_open

WIDTH = 1500
MODEL = "model.safetensors"


def names(path: Path) -> list[str]:
    """Return the files that both stock's checkpoints and ours have, and those that the script wrote."""
    return sorted(
        name for name in os.listdir(path) if not name.startswith(("rank-", "optimizer", "random", "manifest"))
    )


def write_json(d: Path) -> Any:
    with open(d / "trainer_state.json", "w") as file:
        json.dump({"step": 1}, file)
    return names(d)


def save_temporary(d: Path) -> Any:
    os.rename(d, d.with_name("final"))
    return names(d.with_name("final"))


def archive(d: Path) -> Any:
    with tarfile.open(d.with_name("a.tar"), "w") as tar:
        tar.add(d, "a")
    with zipfile.ZipFile(d.with_name("a.zip"), "w") as zipped:
        zipped.write(d / MODEL, MODEL)
    with tarfile.open(d.with_name("a.tar")) as tar:
        return [f"a/{MODEL}" in tar.getnames(), zipfile.ZipFile(d.with_name("a.zip")).namelist()]


def remove(d: Path) -> Any:
    shutil.rmtree(d, ignore_errors=True)
    return os.path.exists(d)


def remove_if_there(d: Path) -> Any:
    there = os.path.exists(d)
    if there:
        shutil.rmtree(d)
    return there


def remove_all(d: Path) -> Any:
    shutil.rmtree(d.parent)
    return d.parent.exists()


def prune_by_date(d: Path) -> Any:
    """Keep the newest checkpoint by date, which is the one just saved."""
    os.makedirs(d.with_name("checkpoint-0"))
    os.utime(d.with_name("checkpoint-0"), (1, 1))
    *old, newest = sorted(glob.glob(str(d.with_name("checkpoint-*"))), key=os.path.getmtime)
    for path in old:
        shutil.rmtree(path)
    return [os.path.basename(newest), names(d.parent)]


def link(d: Path) -> Any:
    os.symlink(d.name, d.with_name("latest"))
    return [(d.with_name("latest") / MODEL).exists(), names(d.with_name("latest"))]


def upload(d: Path) -> Any:
    """Walk the directory in a thread, as clients of artifact stores do."""

    def walk() -> Any:
        return [sorted(set(files) & {MODEL}) for _, _, files in os.walk(d)]

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(walk).result()


def in_a_thread_alone(d: Path) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return sorted(set(pool.submit(os.listdir, d).result()) & {MODEL})


def program(d: Path) -> Any:
    copied = subprocess.run(["cp", "-r", str(d), str(d.with_name("copied"))], check=False).returncode
    return [copied, os.system(f"test -f '{d / MODEL}'")]


def replace_best(d: Path) -> Any:
    best = d.with_name("best")
    os.makedirs(best)
    shutil.rmtree(best)
    os.replace(d, best)
    return names(best)


def change_directory(d: Path) -> Any:
    here = os.getcwd()
    os.chdir(d)
    try:
        return os.path.isfile(MODEL)
    finally:
        os.chdir(here)


def is_tensor(file: Any) -> bool:
    return isinstance(file.get_tensor("0.weight"), torch.Tensor)


def opened(d: Path) -> Any:
    with safe_open(str(d / MODEL), framework="pt") as file:
        return [is_tensor(file), isinstance(file, safe_open)]


def disk_usage(d: Path) -> Any:
    return (d / MODEL).stat().st_size == sum(os.path.getsize(path) for path in d.rglob(MODEL)) > WIDTH**2


CASES: dict[str, Callable[[Path], Any]] = {
    "json": write_json,
    "listdir": names,
    "listdir of the parent": lambda d: d.name in os.listdir(d.parent),
    "iterdir": lambda d: MODEL in [path.name for path in d.iterdir()],
    "glob": lambda d: [os.path.basename(path) for path in glob.glob(f"{d}/model*")],
    "exists": lambda d: [d.exists(), d.is_dir(), os.path.isdir(d), os.access(d, os.R_OK), (d / MODEL).is_file()],
    "relative and bytes": lambda d: [os.path.exists(os.path.relpath(d)), os.path.isdir(os.fsencode(d))],
    "through a link": lambda d: (pathlib.Path(f"{d.parent}-link") / d.name / MODEL).exists(),
    "makedirs": lambda d: [os.makedirs(d, exist_ok=True), write_json(d)],
    "mkdir": lambda d: (d / "unet").mkdir(),
    "copytree": lambda d: names(shutil.copytree(d, d.with_name("best"))),
    "copy a file": lambda d: os.path.basename(shutil.copy(d / MODEL, d.with_name("copied"))),
    "rename": save_temporary,
    "Path.rename": lambda d: names(d.rename(d.with_name("final"))),
    "move": lambda d: names(Path(shutil.move(d, d.with_name("moved")))),
    "replace": replace_best,
    "rename of the parent": lambda d: names(d.parent.rename(f"{d.parent}-renamed") / d.name),
    "load_file": lambda d: len(safetensors.torch.load_file(d / MODEL)),
    "safe_open": opened,
    "torch.load": lambda d: len(safetensors.torch.load((d / MODEL).read_bytes())),
    "hash": lambda d: len(hashlib.sha256((d / MODEL).read_bytes()).hexdigest()),
    "sizes": disk_usage,
    "archive": archive,
    "make_archive": lambda d: os.path.basename(shutil.make_archive(str(d.with_name("b")), "tar", d)),
    "symlink": link,
    "upload": upload,
    "listdir on a thread": in_a_thread_alone,
    "program": program,
    "chdir": change_directory,
    "rmtree": remove,
    "rmtree if there": remove_if_there,
    "rmtree of all": remove_all,
    "prune by date": prune_by_date,
}


def main(out: Path, chosen: list[str]) -> None:
    project = ProjectConfiguration()
    accelerator = Accelerator(project_config=project)
    torch.manual_seed(1)
    accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)))
    for number, (case, act) in enumerate(CASES.items()):
        if chosen and case not in chosen:
            continue
        folder = out / str(number)
        os.makedirs(folder)
        os.symlink(folder.name, f"{folder}-link")
        d = folder / "checkpoint-1"
        accelerator.save_state(str(d))
        try:
            found = act(d)
        except OSError as error:
            found = f"{type(error).__name__}"
        print(json.dumps([case, found]), flush=True)
    accelerator.end_training()
    left = {str(path.relative_to(out)) for path in out.glob("*/*") if path.is_dir() and not path.is_symlink()}
    print(json.dumps(["left", sorted(path for path in left if not path.partition("/")[0].endswith("-link"))]))
    names = {thread.name for thread in threading.enumerate() if "ckpt" in thread.name}
    print(json.dumps(["threads", sorted(names - {"ckpt-signals"})]))  # which lives as long as the process


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
