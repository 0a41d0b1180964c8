"""The order of file operations in a save: what makes a crash at any instant harmless."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ckpt_core import Checkpointer, verify
from ckpt_core.storage import local
from tests.conftest import ROOT
from tests.support.states import assert_same_state, tensor_of

Operation = tuple[str, str]  # what is done, and to which file: "part", "final", "directory"


class Recorder:
    """Stands for ``os`` in the local storage and records what is done to which file."""

    def __init__(self, final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.final = final
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        self._names: dict[int, str] = {}
        for name in (
            "open",
            "pwrite",
            "fsync",
            "ftruncate",
            "replace",
            "unlink",
            "close",
            "rename",
            "link",
            "truncate",
        ):
            monkeypatch.setattr(local.os, name, self._recording(name, getattr(os, name)))

    def _recording(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            subject = args[0]
            which = self._names.get(subject, "other") if isinstance(subject, int) else self._which(subject)
            result = real(*args, **options)
            if name == "open":
                self._names[result] = which
                writes = args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                if not writes:
                    return result
            if name == "close":
                self._names.pop(subject, None)
                return result
            if which != "other":
                self.operations.append((name, which))
            if name == "replace":
                assert self._which(args[1]) == "final"
            return result

        return call

    def _which(self, path: Any) -> str:
        path = Path(os.fspath(path))
        if path == self.final:
            return "final"
        if path == self.final.parent:
            return "directory"
        return "part" if path.parent == self.final.parent and path.name.endswith(".ckpt-part") else "other"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("again", [False, True], ids=["save", "save again"])
def test_bytes_are_durable_before_the_name_is(
    strategy: Any, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "a.ckpt"
    if again:
        with Checkpointer(strategy="sync") as checkpointer:
            checkpointer.save({"old": 1}, path)
    with monkeypatch.context() as patch:
        recorder = Recorder(path, patch)
        with Checkpointer(strategy=strategy) as checkpointer:
            checkpointer.save({"w": tensor_of(torch.uint8, 40 * 2**20)}, path)
    operations = [operation for operation in recorder.operations if operation != ("fsync", "directory")]
    assert operations[0] == ("open", "part")
    kinds = [name for name, _ in operations]
    assert {which for _, which in operations} == {"part"}, "the final name is touched by nothing but the rename"
    assert kinds.count("pwrite") >= 4
    assert [name for name in kinds if name != "pwrite"] == ["open", "ftruncate", "fsync", "replace"]
    assert kinds.index("ftruncate") > max(index for index, name in enumerate(kinds) if name == "pwrite")
    after = recorder.operations[recorder.operations.index(("replace", "part")) + 1 :]
    assert after == [("fsync", "directory")]
    assert verify(path)


def test_a_new_directory_is_durable_before_the_file_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real_sync = local.sync_directory

    def remember(directory: str) -> None:
        synced.append(os.path.relpath(directory, tmp_path))
        real_sync(directory)

    monkeypatch.setattr(local, "sync_directory", remember)
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "one" / "two" / "three" / "a.ckpt")
    assert synced == [".", "one", "one/two", "one/two/three"]


class PowerLossError(BaseException):
    """Raised by all further operations, as if the process were gone."""


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_stopped_after_any_operation_the_name_holds_the_old_or_the_new(strategy: Any, tmp_path: Path) -> None:
    """Check every prefix of the operations, as a crashed process leaves it, with nothing cleaned up."""
    old, new = {"old": 1}, {"w": tensor_of(torch.uint8, 100_000)}
    path = tmp_path / "a.ckpt"
    count = 0
    outcomes = []
    while True:
        for name in os.listdir(tmp_path):
            (tmp_path / name).unlink()
        with Checkpointer(strategy="sync") as checkpointer:
            checkpointer.save(old, path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local.LocalStorage, "claim", lambda *_: None)  # locks, too, and changes nothing on the disk
            done = _stop_after(count, patch)
            patch.setattr(local.LocalFileWriter, "abort", lambda writer: writer._close())
            checkpointer = Checkpointer(strategy=strategy, on_error="warn")
            with contextlib.suppress(PowerLossError):
                checkpointer.save(new, path)
            checkpointer.close()
        assert verify(path)
        state = Checkpointer(strategy="sync").load(path)
        outcomes.append("old" in state)
        assert_same_state(state, old if "old" in state else new)
        with Checkpointer(strategy="sync") as checkpointer:
            checkpointer.save(new, tmp_path / "next.ckpt")
        assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "next.ckpt"], "the orphan is gone"
        count += 1
        if done():
            break
    assert len(outcomes) >= 6
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes[0]
    assert not outcomes[-1]


def _stop_after(count: int, patch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Let ``count`` changing operations happen and stop at the next; return a function that tells if none was left."""
    left = count
    stopped = False

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left, stopped
            if stopped or left == 0:
                stopped = True
                raise PowerLossError
            left -= 1
            return real(*args, **options)

        return call

    for name in ("pwrite", "ftruncate", "fsync", "replace"):
        patch.setattr(local.os, name, wrap(getattr(os, name)))
    patch.setattr(local.fcntl, "flock", wrap(fcntl.flock))
    return lambda: not stopped


def test_the_system_calls_of_a_save(tmp_path: Path, unavailable: Callable[[str], NoReturn]) -> None:
    """The same order of operations, as the kernel sees it."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    script = (
        "import torch; from ckpt_core import Checkpointer\n"
        "with Checkpointer() as c:\n"
        "    for i in range(2): c.save({'w': torch.ones(5_000_000)}, 'here/a.ckpt')\n"
    )
    calls = "trace=openat,pwrite64,write,fsync,fdatasync,ftruncate,rename,renameat,renameat2,unlink,fallocate,close"
    done = subprocess.run(
        ["strace", "-f", "-y", "-qq", "-e", calls, "-o", "trace", sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace is not allowed: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    kinds = []
    for line in (tmp_path / "trace").read_text().splitlines():
        match = re.match(r"\d+ +(?:<\.\.\. )?(\w+)[( ](.*)", line)
        if match is None or "here" not in line or "resumed" in line:
            continue
        call, rest = match[1], match[2]
        if call == "openat" and "O_CREAT" in rest:
            assert ".ckpt-part" in rest, line
            kinds.append("create")
        elif call in ("pwrite64", "write", "ftruncate", "fallocate", "fsync", "fdatasync"):
            target = rest[: rest.index(">")] if ">" in rest else rest
            kinds.append(
                f"{call} {'part' if '.ckpt-part' in target else 'directory' if target.endswith('here') else line}"
            )
        elif call.startswith("rename"):
            kinds.append("rename")
        elif call == "unlink":
            kinds.append("unlink")
    text = " ".join(kinds).replace("pwrite64 part", "w")
    one = r"create (?:fallocate part )?(?:w ){2,}ftruncate part (?:fsync|fdatasync) part rename fsync directory"
    assert re.fullmatch(f"{one} {one}", text), text
