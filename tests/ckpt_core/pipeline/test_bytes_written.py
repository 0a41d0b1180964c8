"""Every byte that a save writes equals the byte that was recorded before the code was rearranged.

``bytes_written.json`` holds digests of whole checkpoints. ``python -m tests.ckpt_core.pipeline.test_bytes_written``
records them again, which only an intended change of a format justifies.
"""

from __future__ import annotations

import json
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part, RankGroup, commit_time
from ckpt_core.digest import digest
from ckpt_core.storage import storage_for
from ckpt_core.tiers import LEDGER_NAME, Tiers
from tests.support.fine_tuning import FineTune
from tests.support.states import DTYPES, tensor_of

RECORDED = Path(__file__).with_name("bytes_written.json")
WINDOWS = 5_000_000  # floats: more than one window of a file
STATES = ("model", "dtypes", "views", "empty", "plain", "large")
STRATEGIES = ("sync", "async")

Written = dict[str, str]


class StoppedClock:
    """A clock that gives every checkpoint the same commit time."""

    def now(self) -> float:
        return 1.7e9 + 0.000001

    def note(self, committed: float) -> None:
        """Ignore the time of another checkpoint."""


def state_named(name: str) -> dict[str, Any]:
    weight = tensor_of(torch.float32, 30, 40, seed=1)
    if name == "model":
        moments = {0: {"exp_avg": weight / 2, "step": torch.tensor(3.0)}}
        return {
            "weights": {"embed": weight, "bias": torch.arange(7, dtype=torch.bfloat16)},
            "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}]},
            "step": 12,
            "done": False,
        }
    if name == "dtypes":
        known = [dtype for dtype in DTYPES if str(dtype) != "torch.bcomplex32"]  # not in all versions of torch
        return {str(dtype): tensor_of(dtype, 3, 5, seed=2) for dtype in known}
    if name == "views":
        big = tensor_of(torch.float32, 300, 200, seed=3)
        return {
            "all": big,
            "tied": big,
            "rows": big[10:20],
            "columns": big[:, 3:7],
            "transposed": tensor_of(torch.int16, 40, 30, seed=4).t(),
            "strided": tensor_of(torch.int64, 50, seed=5)[::3],
            "expanded": torch.tensor([1.5]).expand(4, 6),
            "parameter": torch.nn.Parameter(weight),
        }
    if name == "empty":
        return {"none": torch.empty(0, 7), "scalar": torch.tensor(2.5), "list": [], "dict": {}, "text": ""}
    if name == "plain":
        return {
            "epoch": 3,
            "names": ["a", None, True, 1.25],
            "tuple": (1, "two"),
            "nested": {"deep": {"deeper": [0.1]}},
        }
    assert name == "large"
    return {
        "first": torch.arange(11),
        "w": tensor_of(torch.float32, WINDOWS, seed=6),
        "last": tensor_of(torch.uint8, 4097),
    }


def parts_of(name: str, rank: int = 0) -> list[Part]:
    whole = {key: value for key, value in state_named(name).items() if key != "expanded"}
    return [
        Part("state", whole, Kind.REPLICATED),
        Part("shared", {"w": tensor_of(torch.float16, 64, 33, seed=7), "n": 5}, Kind.SHARDED),
        Part("rng", {"seed": torch.tensor([rank, 1]), "text": f"rank {rank}"}, Kind.PER_RANK),
    ]


def add_files(directory: str) -> None:
    Path(directory, "config.json").write_text('{"hidden": 4}')
    Path(directory, "tokenizer").mkdir()
    Path(directory, "tokenizer", "vocab.txt").write_text("a\nb\n")


def ranks_of(world_size: int) -> list[RankGroup]:
    store = HashStore() if world_size > 1 else None
    return [RankGroup(rank, world_size, store, "same-session") for rank in range(world_size)]


def on_all(groups: list[RankGroup], work: Callable[[RankGroup], None]) -> None:
    """Do the work on all ranks, which are threads that share only the store."""
    errors: list[BaseException] = []

    def run(group: RankGroup) -> None:
        try:
            work(group)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(group,)) for group in groups[1:]]
    for thread in threads:
        thread.start()
    run(groups[0])
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def written_below(root: Path | str) -> Written:
    """Return size and digest of every file, by its name below ``root``."""
    if isinstance(root, Path):
        files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    else:
        files = {}
        storage = storage_for(root)
        for directory in (root, *storage.subdirectories(root)):
            for found in storage.list(directory):
                with storage.open(found.path) as reader:
                    data = bytearray(reader.size)
                    reader.read_into(0, memoryview(data))
                files[found.path.removeprefix(f"{root}/")] = bytes(data)
    return {name: f"{len(files[name])} {digest(files[name])}" for name in sorted(files)}


# ---- what is written -------------------------------------------------------------------------------------------------


def files(root: Path, strategy: Any) -> Written:
    with Checkpointer(strategy=strategy) as checkpointer:
        for name in STATES:
            checkpointer.save(state_named(name), root / f"{name}.ckpt")
        checkpointer.save(state_named("plain"), root / "model.ckpt")  # over the one from the loop
        checkpointer.save(state_named("model"), root / "model.ckpt")
        checkpointer.copy(root / "model.ckpt", root / "copy.ckpt")
    return written_below(root)


def directories(root: Path | str, strategy: Any, world_size: int, *, slices: bool) -> Written:
    def work(group: RankGroup) -> None:
        with DirectoryCheckpointer(
            ranks=group, strategy=strategy, slice_replicated=slices, link_unchanged=False, commit_timeout=60
        ) as checkpointer:
            for number, name in enumerate(STATES):
                checkpointer.save(parts_of(name, group.rank), f"{root}/{name}", metadata={"n": number}, step=number)
            checkpointer.save(parts_of("views", group.rank), f"{root}/over", write_files=add_files)
            checkpointer.save(
                parts_of("model", group.rank), f"{root}/over", write_files=add_files, metadata={"step": 7}
            )
            checkpointer.copy(f"{root}/over", f"{root}/copy")

    on_all(ranks_of(world_size), work)
    return written_below(root)


def fine_tune(root: Path, strategy: Any, world_size: int) -> Written:
    """Save a model most of which is frozen: its files are linked from the second save on."""

    def work(group: RankGroup) -> None:
        run = FineTune.new(width=400)
        with DirectoryCheckpointer(ranks=group, strategy=strategy, slice_replicated=True) as checkpointer:
            for number in range(5):
                run.step()
                checkpointer.save(run.parts(), f"{root}/{number}")
                checkpointer.wait()

    on_all(ranks_of(world_size), work)
    return written_below(root)


def uploads(root: Path) -> Written:
    tiers = Tiers(local_dir=str(root / "local"), upload_to=str(root / "store"))
    with Checkpointer(tiers=tiers) as checkpointer:
        checkpointer.save(state_named("model"), root / "local" / "a.ckpt")
    with DirectoryCheckpointer(ranks=ranks_of(1)[0], tiers=tiers) as checkpointer:
        checkpointer.save(parts_of("model"), root / "local" / "b", write_files=add_files)
    return {name: what for name, what in written_below(root).items() if not name.endswith(LEDGER_NAME)}


CASES: dict[str, Callable[[Path, Any], Written]] = {
    "files": files,
    **{
        f"directories of {world}{' in slices' if slices else ''}": (
            lambda root, strategy, world=world, slices=slices: directories(root, strategy, world, slices=slices)
        )
        for world in (1, 2)
        for slices in (False, True)
    },
    "directories in a store": lambda _, strategy: directories(
        f"memory://{uuid.uuid4().hex}", strategy, 1, slices=False
    ),
    "fine-tune of 1": lambda root, strategy: fine_tune(root, strategy, 1),
    "fine-tune of 2": lambda root, strategy: fine_tune(root, strategy, 2),
    "uploads": lambda root, _: uploads(root),
}


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_time, "_clock", StoppedClock())


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes_as_ever(case: str, strategy: str, stopped_clock: None, tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())[case]
    assert CASES[case](tmp_path, strategy) == recorded


def test_a_byte_more_or_less_would_be_noticed(stopped_clock: None, tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())["files"]
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({**state_named("plain"), "epoch": 4}, tmp_path / "plain.ckpt")
    assert written_below(tmp_path)["plain.ckpt"] != recorded["plain.ckpt"]


if __name__ == "__main__":
    setattr(commit_time, "_clock", StoppedClock())  # noqa: B010
    found = {}
    for each, act in CASES.items():
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            found[each] = act(Path(one), "sync")
            assert found[each] == act(Path(other), "async"), each
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
