"""The verbs that move and delete checkpoints: ``cp``, ``mv``, ``prune`` and ``du``, on disks and on a store."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.cli import main
from ckpt_core.pins import note_of_pin
from ckpt_core.storage import LocalStorage
from tests.support.damage import flip_bit
from tests.support.servers import Server

Capture = pytest.CaptureFixture[str]
TENSOR = torch.arange(50_000.0)


def parts(step: int) -> list[Part]:
    return [Part("model", {"large": TENSOR, "weight": torch.full((8,), float(step))}, Kind.REPLICATED)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Directories of the steps 10 to 50, ``last`` as a copy of the newest, and one file of another program."""
    root = tmp_path / "run"
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        for step in range(10, 60, 10):
            checkpointer.save(parts(step), root / f"step={step}", step=step)
        checkpointer.copy(root / "step=50", root / "last")
    torch.save({"w": torch.ones(2)}, root / "stock.ckpt")
    return root


def as_json(capsys: Capture, *words: object) -> Any:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- prune and du ----------------------------------------------------------------------------------------------------


def test_prune_says_why_each_stays_and_deletes_the_rest(run: Path, capsys: Capture) -> None:
    flip_bit(run / "step=20" / "manifest.json", -1)  # a checkpoint that cannot be read is kept
    words = ("prune", run, "--keep", "latest=2", "--keep", "every_steps=25,at_steps=10")
    before = sorted(os.listdir(run))
    planned = as_json(capsys, *words, "--dry-run")
    assert sorted(os.listdir(run)) == before
    assert planned["deleted"] is False
    reasons = {os.path.basename(entry["path"]): entry["kept_because"] for entry in planned["checkpoints"]}
    assert reasons == {
        "last": ["newest", "latest=2", "every_steps=25"],
        "step=50": ["newest", "latest=2", "every_steps=25"],
        "step=40": ["latest=2"],
        "step=30": ["every_steps=25"],
        "step=20": ["cannot be read: delete it yourself"],
        "step=10": ["at_steps=10"],
        "stock.ckpt": ["does not say its step and time"],
    }
    done = as_json(capsys, "prune", run, "--keep", "latest=1", "--yes")
    assert done["deleted"] is True
    assert sorted(os.listdir(run)) == ["last", "step=20", "step=50", "stock.ckpt"]


def test_prune_deletes_nothing_unless_somebody_says_so(run: Path, capsys: Capture) -> None:
    before = sorted(os.listdir(run))
    assert main(["prune", str(run), "--keep", "latest=1"]) == 2
    captured = capsys.readouterr()
    assert "to delete: 4 of 7 checkpoints" in captured.out and "--yes deletes" in captured.err
    assert main(["prune", str(run)]) == 2
    assert f"ckpt clean {run}" in capsys.readouterr().err
    for rule in ("newest=1", "latest=0", "latest=x"):
        with pytest.raises(SystemExit):
            main(["prune", str(run), "--keep", rule])
    assert sorted(os.listdir(run)) == before


def test_du_counts_links_once_and_prune_says_what_is_really_freed(run: Path, capsys: Capture) -> None:
    found = as_json(capsys, "du", run)
    sizes = {os.path.basename(entry["path"]): entry for entry in found["checkpoints"]}
    assert sizes["step=50"]["bytes"] > TENSOR.nbytes > sizes["step=50"]["freed"], "last has the same tensors"
    on_disk = {(s.st_dev, s.st_ino): s.st_size for s in (p.stat() for p in run.rglob("*") if p.is_file())}
    assert found["bytes"] == sum(on_disk.values())
    planned = as_json(capsys, "prune", run, "--keep", "latest=1", "--dry-run")
    as_json(capsys, "prune", run, "--keep", "latest=1", "--yes")
    left = {(s.st_dev, s.st_ino): s.st_size for s in (p.stat() for p in run.rglob("*") if p.is_file())}
    assert planned["freed"] == sum(on_disk.values()) - sum(left.values())


# ---- cp and mv -------------------------------------------------------------------------------------------------------


def test_cp_takes_a_directory_of_checkpoints_and_continues_where_it_ended(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    first = as_json(capsys, "cp", run / "step=10", run / "stock.ckpt", tmp_path / "there")
    assert [entry["was_there"] for entry in first] == [False, False]
    os.remove(tmp_path / "there" / "stock.ckpt")
    done = as_json(capsys, "cp", run, tmp_path / "there")
    was_there = {os.path.basename(entry["source"]): entry["was_there"] for entry in done}
    assert was_there.pop("step=10") is True
    assert set(was_there.values()) == {False} and len(was_there) == 6
    assert sorted(os.listdir(tmp_path / "there")) == sorted(os.listdir(run))
    assert main(["verify", str(tmp_path / "there")]) == 0
    capsys.readouterr()
    here, there = as_json(capsys, "ls", run), as_json(capsys, "ls", tmp_path / "there")
    ages = [{(entry["step"], entry["committed"]) for entry in listed} for listed in (here, there)]
    assert ages[0] == ages[1], "a copy is as old as what it is of"


def test_cp_of_what_is_damaged_leaves_the_target_as_it_was(run: Path, tmp_path: Path, capsys: Capture) -> None:
    flip_bit(run / "step=10" / "model.safetensors", -1)
    assert main(["cp", str(run / "step=10"), str(tmp_path / "copy")]) == 1
    assert "CheckpointCorruptedError" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_cp_replaces_another_checkpoint_only_if_it_is_told(run: Path, tmp_path: Path, capsys: Capture) -> None:
    files = Checkpointer(strategy="sync")
    for step in (1, 2):
        files.save({"step": step}, tmp_path / f"{step}.ckpt")
    one, two = str(tmp_path / "1.ckpt"), str(tmp_path / "2.ckpt")
    assert main(["cp", one, two]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert files.load(two) == {"step": 2}
    assert main(["cp", "--force", one, two]) == 0
    assert files.load(two) == {"step": 1}
    assert main(["cp", one, one]) == 1
    assert "are the same" in capsys.readouterr().err
    assert files.load(one) == {"step": 1}


@pytest.mark.parametrize("verb", ["cp", "mv"])
def test_what_was_done_before_the_target_refused_is_said(verb: str, run: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "there"
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts(7), target / "step=30", step=7)  # another checkpoint, in the way
    assert main([verb, *(str(run / f"step={step}") for step in (10, 20, 30, 40)), str(target), "--json"]) == 1
    captured = capsys.readouterr()
    assert [entry["target"] for entry in json.loads(captured.out)] == [f"{target}/step=10", f"{target}/step=20"]
    assert captured.err.count("ckpt: StorageError") == 1 and f"{target}/step=30" in captured.err
    assert sorted(os.listdir(target)) == ["step=10", "step=20", "step=30"]


def test_mv_deletes_what_has_arrived(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert main(["keep", str(run / "step=20"), "--note", "v1"]) == 0
    assert main(["mv", str(run / "step=20"), str(tmp_path / "there")]) == 0
    assert not (run / "step=20").exists() and not (run / ".step=20.keep").exists()
    assert note_of_pin(str(tmp_path / "there" / "step=20"), LocalStorage()) == "v1"
    with DirectoryCheckpointer().load(tmp_path / "there" / "step=20") as checkpoint:
        assert torch.equal(checkpoint.load("model")["weight"], torch.full((8,), 20.0))


# ---- on a store ------------------------------------------------------------------------------------------------------


def test_on_a_store(server_of: Callable[[str], Server], run: Path, tmp_path: Path, capsys: Capture) -> None:
    server = server_of("moto")
    bucket = server.new_bucket()
    options = ("--storage-options", json.dumps(dict(server.options)))
    as_json(capsys, "cp", run / "step=50", run / "stock.ckpt", f"{bucket}/run/", *options)
    found = as_json(capsys, "ls", f"{bucket}/run", *options)
    assert {(os.path.basename(e["path"]), e["step"], e["kind"]) for e in found} == {
        ("step=50", 50, "directory"),
        ("stock.ckpt", None, "file"),
    }
    (alone,) = as_json(capsys, "ls", f"{bucket}/run/stock.ckpt", *options)
    assert alone["bytes"] == (run / "stock.ckpt").stat().st_size
    verified = as_json(capsys, "verify", f"{bucket}/run", *options)
    assert sorted(entry["state"] for entry in verified) == ["no digests", "whole"]
    as_json(capsys, "mv", f"{bucket}/run", tmp_path / "back/", *options)
    assert sorted(os.listdir(tmp_path / "back")) == ["step=50", "stock.ckpt"]
    capsys.readouterr()
    assert main(["ls", f"{bucket}-that-is-not-there/run", *options]) == 1
    assert main(["verify", f"{bucket}/nope", *options]) == 3
    assert "no such file, directory or bucket" in capsys.readouterr().err


@pytest.mark.extended
def test_from_one_store_to_another(
    server_of: Callable[[str], Server], run: Path, tmp_path: Path, capsys: Capture
) -> None:
    one, other = server_of("moto"), server_of("gcs")
    first, second = one.new_bucket(), other.new_bucket()
    of_one, of_other = json.dumps(dict(one.options)), json.dumps(dict(other.options))
    both = ("--storage-options", of_one, "--target-storage-options", of_other)
    as_json(capsys, "cp", run / "step=10", run / "step=20", f"{second}/run/", "--target-storage-options", of_other)
    back = ("--storage-options", of_other, "--target-storage-options", of_one)
    as_json(capsys, "mv", f"{second}/run", f"{first}/run", *back)
    assert main(["ls", f"{second}/run", "--storage-options", of_other]) == 1
    as_json(capsys, "cp", f"{first}/run/step=10", f"{second}/copied", *both)
    assert synced(capsys, f"{first}/run", f"{second}/synced", *both) == {"step=10": "copy", "step=20": "copy"}
    for path, options in ((f"{first}/run", of_one), (f"{second}/copied", of_other), (f"{second}/synced", of_other)):
        verified = as_json(capsys, "verify", path, "--storage-options", options)
        assert {entry["state"] for entry in verified} == {"whole"}
    # without options of its own, the target is where the source is
    as_json(capsys, "cp", f"{first}/run/step=10", f"{first}/again", "--storage-options", of_one)
    assert main(["verify", f"{first}/again", "--storage-options", of_one]) == 0


# ---- sync ------------------------------------------------------------------------------------------------------------


def synced(capsys: Capture, *words: object, code: int = 0) -> dict[str, str]:
    assert main(["sync", *map(str, words), "--json"]) == code
    return {os.path.basename(entry["path"]): entry["action"] for entry in json.loads(capsys.readouterr().out)}


def listing(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def test_sync_copies_what_is_missing_and_replaces_what_is_older(run: Path, tmp_path: Path, capsys: Capture) -> None:
    there = tmp_path / "there"
    assert set(synced(capsys, run, there, "--dry-run").values()) == {"copy"} and not there.exists()
    assert set(synced(capsys, run, there).values()) == {"copy"}
    assert set(synced(capsys, run, there, "--verify").values()) == {"was there"}
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts(60), run / "step=60", step=60)
        checkpointer.copy(run / "step=60", run / "last")
    done = synced(capsys, run, there)
    assert {name for name, action in done.items() if action != "was there"} == {"step=60", "last"}
    assert done["step=60"] == "copy" and done["last"] == "replace"
    assert as_json(capsys, "diff", run / "last", there / "last")["differ"] == {}
    assert listing(there) == listing(run)
    # but not in the other direction
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts(70), there / "last", step=70)
    assert synced(capsys, run, there, code=1)["last"] == "keep"
    assert as_json(capsys, "ls", there / "last")[0]["step"] == 70


def test_sync_of_what_is_damaged_copies_the_rest_and_deletes_nothing(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    there = tmp_path / "there"
    as_json(capsys, "cp", run / "step=10", run / "step=20", there)
    shutil.rmtree(run / "step=20")
    flip_bit(run / "step=30" / "model.safetensors", -1)  # found when it is compared
    (run / "step=40" / "manifest.json").write_text("{")  # found at once
    done = synced(capsys, run, there, "--delete", "--yes", code=1)
    assert (done["step=30"], done["step=40"], done["step=20"]) == ("FAILED", "keep", "keep")
    assert listing(there) == ["last", "step=10", "step=20", "step=50", "stock.ckpt"]
    assert main(["verify", str(there)]) == 0
    # a damaged checkpoint at the target is replaced from the source
    (there / "step=10" / "manifest.json").write_text("{")
    shutil.rmtree(run / "step=30")
    shutil.rmtree(run / "step=40")
    capsys.readouterr()
    assert synced(capsys, run, there)["step=10"] == "replace"
    assert main(["verify", str(there)]) == 0


def test_sync_deletes_only_what_is_surely_not_wanted(run: Path, tmp_path: Path, capsys: Capture) -> None:
    there = tmp_path / "there"
    as_json(capsys, "cp", run, there)
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts(80), there / "step=80", step=80)
    assert main(["keep", str(there / "step=10")]) == 0
    capsys.readouterr()
    for name in ("step=10", "step=20", "step=30"):
        shutil.rmtree(run / name)
    (run / "stock.ckpt").unlink()
    before = listing(there)
    assert synced(capsys, run, there) == {"step=40": "was there", "step=50": "was there", "last": "was there"}
    assert synced(capsys, run, there, "--delete", code=2)["step=20"] == "asked"
    assert synced(capsys, run, there, "--delete", "--dry-run")["step=20"] == "delete"
    assert listing(there) == before
    done = synced(capsys, run, there, "--delete", "--yes")
    assert {name: done[name] for name in ("step=10", "step=20", "step=30", "step=80", "stock.ckpt")} == {
        "step=10": "keep",  # pinned
        "step=20": "delete",
        "step=30": "delete",
        "step=80": "keep",  # newer than all of the source
        "stock.ckpt": "keep",  # of another program
    }
    assert listing(there) == ["last", "step=10", "step=40", "step=50", "step=80", "stock.ckpt"]

    (tmp_path / "empty").mkdir()
    for words in ((tmp_path / "empty", there), (tmp_path / "nope", there), (run, run)):
        assert main(["sync", *map(str, words), "--delete", "--yes"]) == 1
    assert listing(there) == ["last", "step=10", "step=40", "step=50", "step=80", "stock.ckpt"]


def test_sync_of_a_tree_with_a_store_and_back(
    server_of: Callable[[str], Server], run: Path, tmp_path: Path, capsys: Capture
) -> None:
    server = server_of("moto")
    bucket = server.new_bucket()
    options = ("--storage-options", json.dumps(dict(server.options)))
    Checkpointer(strategy="sync").save({"step": 5}, run / "second" / "a.ckpt")
    (run / "step=20" / "model.safetensors").unlink()
    assert synced(capsys, "-R", run, f"{bucket}/all", *options, code=1)["step=20"] == "FAILED"
    shutil.rmtree(run / "step=20")
    assert set(synced(capsys, "-R", run, f"{bucket}/all", *options).values()) == {"was there"}
    assert set(synced(capsys, "-R", f"{bucket}/all", tmp_path / "back", *options).values()) == {"copy"}
    assert listing(tmp_path / "back") == listing(run)
    assert Checkpointer().load(tmp_path / "back" / "second" / "a.ckpt") == {"step": 5}


@pytest.mark.parametrize("kind", ["moto", "azurite", "gcs"])
def test_a_bucket_that_does_not_exist_is_no_first_start(
    server_of: Callable[[str], Server], kind: str, capsys: Capture
) -> None:
    server = server_of(kind)
    bucket = server.new_bucket()
    options = ("--storage-options", json.dumps(dict(server.options)))
    assert main(["latest", f"{bucket}/run", *options]) == 3
    assert "nothing to resume" in capsys.readouterr().err
    assert main(["latest", f"{bucket}typo/run", *options]) == 1
    assert f"there is no such bucket: {bucket}typo\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["cp a.ckpt T/b.ckpt", "mv a.ckpt T/b.ckpt", "sync . T", "convert a.ckpt T/b --to directory"]
)
def test_a_target_in_a_bucket_that_does_not_exist_is_refused_once(
    server_of: Callable[[str], Server],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = server_of("moto")
    missing = f"{server.new_bucket()}-typo"
    monkeypatch.chdir(tmp_path)
    Checkpointer(strategy="sync").save({"step": 1}, "a.ckpt")
    arguments = [word.replace("T", missing) for word in words.split()]
    assert main([*arguments, "--storage-options", json.dumps(dict(server.options))]) == 1
    first, *rest = capfd.readouterr().err.splitlines()
    assert first == f"ckpt: CheckpointNotFoundError: there is no such bucket: {missing}"
    assert rest == ["  what to do: make it, or check its name and the endpoint"]
    assert Path("a.ckpt").exists()


def test_a_hint_names_the_verb_that_was_used(server_of: Callable[[str], Server], capsys: Capture) -> None:
    server = server_of("moto")
    bucket = server.new_bucket()
    options = ["--storage-options", json.dumps(dict(server.options))]
    with Checkpointer(strategy="sync", storage_options=dict(server.options)) as checkpointer:
        checkpointer.save({"step": 1}, f"{bucket}/run/a.ckpt")
    for verb in ("ls", "du"):
        assert main([verb, bucket, *options]) == 0
        hint = f"no checkpoints in {bucket}; 1 below it, such as in {bucket}/run: ckpt {verb} -R {bucket}\n"
        assert capsys.readouterr().err == hint


def test_doctor_of_a_store_leaves_nothing_and_names_a_missing_bucket(
    server_of: Callable[[str], Server], capsys: Capture
) -> None:
    server = server_of("moto")
    bucket = server.new_bucket()
    options = ["--storage-options", json.dumps(server.options)]
    found = as_json(capsys, *options, "doctor", f"{bucket}/runs", "--size", "1")
    assert found["written"] > 0 and found["read"] > 0
    assert main([*options, "ls", bucket]) == 0
    assert capsys.readouterr().err == f"no checkpoints in {bucket}\n"
    assert main([*options, "doctor", f"{bucket}-missing/runs", "--size", "1"]) == 1
    assert f"there is no such bucket: {bucket}-missing\n" in capsys.readouterr().err
