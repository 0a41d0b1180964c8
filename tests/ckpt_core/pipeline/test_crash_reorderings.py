"""Whatever a crash loses of what was not synced yet, the catalog shows the old checkpoint or the new one, whole."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.storage import local_directory
from tests.ckpt_core.pipeline.crash_model import Recorder, Tree, crash_states, materialise

LAYOUTS = ["file", "directory", "directory without exchange"]


class Engine:
    """Saves and finds small checkpoints of one layout, each of which holds one number."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.is_file = layout == "file"
        self.kept: str | None = None  # name of a file that the user has put into each directory

    def checkpointer(self) -> Checkpointer | DirectoryCheckpointer:
        return Checkpointer(strategy="sync") if self.is_file else DirectoryCheckpointer(strategy="sync")

    def save(self, checkpointer: Any, number: int, path: Path) -> None:
        state = {"w": torch.full((1500,), float(number)), "number": number}
        if self.is_file:
            checkpointer.save(state, path)
            return
        parts = [Part("model", state, Kind.REPLICATED), Part("rng", {"number": number}, Kind.PER_RANK)]
        checkpointer.save(parts, path, write_files=lambda place: note(place, number))

    def numbers_in(self, directory: Path) -> dict[str, int]:
        """Return the numbers of the checkpoints that the catalog lists, by name; all of them are verified."""
        found = {}
        catalog = Catalog(directory)
        for info in catalog.checkpoints():
            if not self.is_file:
                with DirectoryCheckpointer().load(info.path) as checkpoint:
                    checkpoint.verify()
                    state = checkpoint.load("model")
                    assert checkpoint.load("rng")["number"] == state["number"]
                    assert checkpoint.read_file("note.txt") == str(state["number"]).encode()
                assert self.kept is None or Path(info.path, self.kept).read_text() == "of the user"
            else:
                state = Checkpointer().load(info.path)
            assert bool((state["w"] == state["number"]).all())
            found[Path(info.path).name] = state["number"]
        return found


def note(place: str, number: int) -> None:
    Path(place, "note.txt").write_text(str(number))


@pytest.fixture(params=LAYOUTS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    if request.param == "directory without exchange":
        monkeypatch.setattr(local_directory, "_exchange", lambda *_: False)
    return Engine(request.param)


Numbers = Mapping[str, int]


def explore(
    engine: Engine,
    directory: Path,
    before: Numbers,
    act: Callable[[Any, Path], None],
    is_right: Callable[[Numbers], bool],
    at_end: Callable[[Numbers], bool],
) -> int:
    """Judge every state that a crash in ``act`` may leave; return how many there were.

    Args:
        engine: Saves and finds the checkpoints.
        directory: Where to work.
        before: The checkpoints that are saved first, by name.
        act: The operations that the crash interrupts.
        is_right: Judges what the catalog shows after the crash.
        at_end: Judges it where ``act`` had finished, so that all must be durable.
    """
    root, place = directory / "run", directory / "after"
    root.mkdir()
    with engine.checkpointer() as checkpointer:
        for name, number in before.items():
            engine.save(checkpointer, number, root / name)
            if engine.kept is not None:
                (root / name / engine.kept).write_text("of the user")
    checkpointer = engine.checkpointer()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        act(checkpointer, root)
        checkpointer.close()
    judged: dict[int, Numbers] = {}
    count = 0
    for moment, tree in crash_states(recorder, random.Random(7)):
        numbers = judged.get(identity := hash(frozenset(tree.items())))
        if numbers is None:
            numbers = judged[identity] = look(engine, tree, place, recorder, moment)
            count += 1
        told = f"after {[operation.name for operation in recorder.operations[recorder.begun_with : moment]]}"
        assert is_right(numbers), f"{numbers} {told}: {sorted(tree)}"
        if moment == len(recorder.operations):
            assert at_end(numbers), f"{numbers} {told}: {sorted(tree)}"
    return count


def look(engine: Engine, tree: Tree, place: Path, recorder: Recorder, moment: int) -> Numbers:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    materialise(tree, place)
    try:
        return engine.numbers_in(place)
    except Exception as error:
        names = [operation.name for operation in recorder.operations[recorder.begun_with : moment]]
        raise AssertionError(f"after {names} there may be {sorted(tree)}: {error}") from error


def test_a_first_save(engine: Engine, tmp_path: Path) -> None:
    def act(checkpointer: Any, root: Path) -> None:
        engine.save(checkpointer, 2, root / "b.ckpt")

    old, new = {"a.ckpt": 1}, {"a.ckpt": 1, "b.ckpt": 2}
    count = explore(engine, tmp_path, old, act, lambda seen: seen in (old, new), lambda seen: seen == new)
    assert count >= 6


def test_a_save_over_an_old_one(engine: Engine, tmp_path: Path) -> None:
    def act(checkpointer: Any, root: Path) -> None:
        engine.save(checkpointer, 2, root / "a.ckpt")

    if not engine.is_file:
        engine.kept = "paper.txt"
    old, new = {"a.ckpt": 1}, {"a.ckpt": 2}
    states = (old, new)
    count = explore(engine, tmp_path, old, act, lambda seen: seen in states, lambda seen: seen == new)
    assert count >= 6


def test_retention(engine: Engine, tmp_path: Path) -> None:
    """A checkpoint is deleted only when its successor is durable, and it is deleted as a whole."""

    def act(checkpointer: Any, root: Path) -> None:
        engine.save(checkpointer, 2, root / "b.ckpt")
        checkpointer.remove(root / "a.ckpt")

    old, both, new = {"a.ckpt": 1}, {"a.ckpt": 1, "b.ckpt": 2}, {"b.ckpt": 2}
    count = explore(engine, tmp_path, old, act, lambda seen: seen in (old, both, new), lambda seen: seen in (both, new))
    assert count >= 6


def test_prune(engine: Engine, tmp_path: Path) -> None:
    def act(_: Any, root: Path) -> None:
        assert len(Catalog(root).prune()) == 2

    root = tmp_path / "run"
    before = {"a.ckpt": 1, "b.ckpt": 2}

    def leave_orphans(checkpointer: Any, root: Path) -> None:
        (root / ".c.ckpt.dead-1.ckpt-part").mkdir()
        (root / ".c.ckpt.dead-1.ckpt-part" / "manifest.json").write_text("{}")
        (root / ".d.ckpt.dead-2.ckpt-part").write_text("x")
        act(checkpointer, root)

    count = explore(engine, tmp_path, before, leave_orphans, lambda seen: seen == before, lambda seen: seen == before)
    assert count >= 4
    assert sorted(path.name for path in root.iterdir()) == sorted(before)
