"""What all verbs of the command have in common: one JSON document, and no traceback when stdout is closed."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from tqdm import tqdm

from ckpt_core import Checkpointer, DirectoryCheckpointer, EventLog, Kind, Part
from ckpt_core._pipeline import loading
from ckpt_core.cli import main, moving, tidying
from ckpt_core.cli.command import _VERBS
from ckpt_core.cli.parser import Commands, _Parser
from ckpt_core.events import size_in_words
from ckpt_core.interchange import load_whole
from ckpt_core.interchange.streaming import new_directory
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.counting import counting
from tests.support.damage import flip_bit

Capture = pytest.CaptureFixture[str]
DOCS = Path(__file__).parents[2] / "docs"

# Each verb, with arguments that it can work on. ``rehearse`` trains: tests/lightning_ckpt/test_rehearsal.py.
VERBS = {
    "ls": "run",
    "latest": "run",
    "inspect": "run/a.ckpt",
    "verify": "run",
    "diff": "run/a.ckpt run/b.ckpt",
    "convert": "run/a.ckpt new --to directory",
    "export": "run/c new --format dcp",
    "import": "dcp new --format dcp",
    "report": "events.jsonl",
    "rehearse": "",
    "cp": "run/a.ckpt new",
    "mv": "run/a.ckpt new",
    "sync": "run new",
    "prune": "run --keep latest=1 --yes",
    "keep": "run/a.ckpt",
    "drop": "run/a.ckpt",
    "du": "run",
    "clean": "run",
    "doctor": "run --size 1 --bytes 10MB",
    "completion": "bash",
}
SETTLED = [verb for verb, words in VERBS.items() if words]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every kind, one with a metric that JSON cannot represent, and an event log."""
    home = tmp_path_factory.mktemp("verbs")
    with Checkpointer(strategy="sync", listeners=[EventLog(home / "events.jsonl")]) as files:
        files.save({"w": torch.ones(3), "step": 1, "metrics": {"loss": float("nan")}}, home / "run" / "a.ckpt")
        files.save({"w": torch.zeros(3), "step": 2}, home / "run" / "b.ckpt")
    with DirectoryCheckpointer(strategy="sync") as directories:
        directories.save([Part("model", {"w": torch.ones(3)}, Kind.REPLICATED)], home / "run" / "c", step=3)
    dcp.save({"model": {"w": torch.ones(300)}}, checkpoint_id=home / "dcp", no_dist=True)
    return home


@pytest.fixture
def home(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(prepared, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def test_no_verb_is_left_out() -> None:
    commands = Commands(_Parser(prog="ckpt"))
    for add in _VERBS:
        add(commands)
    assert set(commands.parsers) == set(VERBS)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("verb", SETTLED)
def test_every_verb_prints_one_json_document(verb: str, capsys: Capture) -> None:
    assert main([verb, *VERBS[verb].split(), "--json"]) == (1 if verb == "diff" else 0)
    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert document or verb == "clean"
    rows = (DOCS / "cli.md").read_text().split("## What `--json` prints")[1].split("\n## ")[0].splitlines()
    row = next(row for row in rows if row.startswith("| ") and f"`{verb}`" in row.split("|")[1])
    assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == keys_of(document)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"verify", "doctor"}))  # these two have something to print
def test_every_verb_that_fails_prints_one_json_document_that_says_why(verb: str, capsys: Capture) -> None:
    words = ["tcsh" if verb == "completion" else "nope", *VERBS[verb].split()[1:]]
    words = [] if verb == "rehearse" else words
    try:
        code = main([verb, "--json", *words])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert set(error) == {"code", "type", "message", "path", "key", "remedy"}
    missing = verb not in ("completion", "rehearse")
    assert error["code"] == code == {"latest": 3, "report": 3, "diff": 2}.get(verb, 1 if missing else 2)
    assert error["message"] in captured.err and ("nope" in error["message"]) == missing
    if error["type"] is not None:
        assert (error["type"], error["remedy"]) == ("CheckpointNotFoundError", "check the path")


@pytest.mark.parametrize("words", [["--json", "inspct"], ["ls", "", "--json"], ["clean", "--json"]])
def test_words_that_make_no_sense_are_a_json_document_too(words: list[str], capsys: Capture) -> None:
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert (error["code"], code) == (2, 2) and error["message"] in captured.err


def keys_of(document: object) -> set[str]:
    """Return those keys of a document that do not depend on what a checkpoint holds."""
    if isinstance(document, list):
        return set().union(*(keys_of(entry) for entry in document))
    fixed = {"checkpoints", "predicted"}
    values = document.items() if isinstance(document, dict) else ()
    return {name for name, _ in values}.union(*(keys_of(value) for name, value in values if name in fixed))


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_an_example_that_can_be_said_and_its_exit_codes(
    verb: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    said = capsys.readouterr().out
    example = next(line for line in said.splitlines() if line.startswith(f"Example: ckpt {verb} "))
    commands = Commands(_Parser(prog="ckpt"))
    for add in _VERBS:
        add(commands)
    commands.parser.parse_args(shlex.split(example)[2:])
    assert "\nExit codes: 0 " in said
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert max(map(len, said.split("storage-options JSON")[1].splitlines())) <= 120


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("words", [*([verb, *VERBS[verb].split()] for verb in SETTLED), ["--help"], ["ls", "--help"]])
def test_no_verb_fails_where_nobody_reads(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        code = main(words)
    assert code == (0 if words[0] == "clean" else 141)  # clean prints nothing
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("verb", ["ls", "export"])
def test_what_has_no_room_is_one_message(verb: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main([verb, *VERBS[verb].split()]) == 1
    assert "No space left on device" in capfd.readouterr().err


@pytest.mark.usefixtures("home")
def test_streams_that_are_closed_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["ls", "run"]) == 0
    assert main(["ls", "nowhere"]) == 1


# ---- other programs' checkpoints -------------------------------------------------------------------------------------


def stock_accelerate(path: Path) -> None:
    (path / "pytorch_model_fsdp_0").mkdir(parents=True)
    dcp.save({"model": {"w": torch.ones(300)}}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
    torch.save({"step": 1}, path / "random_states_0.pkl")


def hugging_face(path: Path) -> None:
    path.mkdir(parents=True)
    safetensors.torch.save_file({"w": torch.ones(3)}, path / "model.safetensors")


def size_of(*paths: Path) -> int:
    return sum(file.stat().st_size for path in paths for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("write", [stock_accelerate, hugging_face])
def test_du_counts_what_other_programs_wrote(write: Callable[[Path], None], tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "runs" / "checkpoint-1")
    write(tmp_path / "runs" / "checkpoint-2")
    one, both = tmp_path / "runs" / "checkpoint-1", tmp_path / "runs"
    assert main(["du", str(one), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == size_of(one) > 0
    assert main(["du", "-r", str(both), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["bytes"], len(found["checkpoints"])) == (size_of(both), 2)


@pytest.mark.usefixtures("home")
def test_du_counts_once_what_is_named_twice(capsys: Capture) -> None:
    said = []
    for words in (["run", "dcp"], ["run/a.ckpt", "run", "dcp", "run/c/", "dcp/", "./run"]):
        assert main(["du", *words]) == 0
        said.append(sorted(line.removesuffix("/").replace("./", "") for line in capsys.readouterr().out.splitlines()))
    assert said[0] == said[1] and len(said[0]) == 5


def dcp_files(path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}, "step": 1}, checkpoint_id=path, no_dist=True)


def model_of_accelerate(path: Path) -> None:
    hugging_face(path)
    states = {"random_state": random.getstate(), "numpy_random_seed": np.random.get_state()}
    torch.save({"step": 1, **states, "torch_manual_seed": torch.get_rng_state()}, path / "random_states_0.pkl")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("layout", ["file", "directory", "dcp", "safetensors", "accelerate"])
@pytest.mark.parametrize("write", [dcp_files, hugging_face, model_of_accelerate])
def test_each_layout_is_written_out_of_each(
    write: Callable[[Path], None], layout: str, tmp_path: Path, capsys: Capture
) -> None:
    write(tmp_path / "source")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "new" / "out"), "--to", layout]) == 0
    assert os.listdir(tmp_path / "new") == ["out"]
    files = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    size = size_in_words(sum(path.stat().st_size for path in files))
    assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / 'out'}: {size}\n"
    if layout == "safetensors":
        (weights,) = safetensors.torch.load_file(tmp_path / "new" / "out" / "model.safetensors").values()
    else:
        weights = load_whole(tmp_path / "new" / "out")["model"]["w"]
    assert torch.equal(weights, torch.ones(3))
    if layout in ("file", "directory"):
        capsys.readouterr()
        assert main(["ls", str(tmp_path / "new" / "out"), "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert listed["state"] == "committed" and listed["committed"] is not None


def test_random_states_of_another_kind_are_said(tmp_path: Path, capsys: Capture) -> None:
    hugging_face(tmp_path / "source")
    torch.save({"step": 1}, tmp_path / "source" / "random_states_0.pkl")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "directory"]) == 1
    error = capsys.readouterr().err
    assert "random states are not as stock Accelerate saves them: KeyError('random_state')" in error
    assert "random_states_0.pkl" in error


def test_ls_and_du_say_where_other_programs_checkpoints_are(tmp_path: Path, capsys: Capture) -> None:
    hugging_face(tmp_path / "runs" / "checkpoint-1")
    named = f"{tmp_path}/runs/checkpoint-1 is a Hugging Face model, 1 file: see ckpt inspect, verify, convert\n"
    for words in (["ls"], ["ls", "-r"], ["du"]):
        assert main([*words, str(tmp_path / "runs")]) == 0
        assert capsys.readouterr().err.endswith(named)


def test_verify_reads_what_ranks_of_stock_accelerate_wrote(tmp_path: Path, capsys: Capture) -> None:
    stock_accelerate(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    (part,) = (tmp_path / "pytorch_model_fsdp_0").glob("*.distcp")
    flip_bit(part)
    assert main(["verify", str(tmp_path)]) == 1
    assert "DAMAGED" in capsys.readouterr().out


# ---- progress --------------------------------------------------------------------------------------------------------

# Verbs that move many bytes, and the targets: a file ``big.ckpt``, directories ``big`` and ``dcp`` of the same tensor.
MOVING = [
    "verify big.ckpt big",
    "inspect big --verify",
    "diff big.ckpt big",
    "latest all",
    "cp big.ckpt new",
    "cp big new",
    "mv all new/",
    "sync all new",
    "convert big.ckpt new --to directory",
    "convert big new --to file",
    "convert dcp new --to file",
    "convert big new --to safetensors",
    "convert big new --to dcp",
    "convert big.ckpt new --to dcp",
    "export big new --format dcp",
    "import dcp new --format dcp",
]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("large")
    state = {"model": {"w": torch.ones(4_000_000)}}
    Checkpointer(strategy="sync").save(state, home / "big.ckpt")
    with DirectoryCheckpointer(strategy="sync") as directories:
        directories.save([Part("model", state["model"], Kind.REPLICATED)], home / "big", step=1)
    dcp.save(state, checkpoint_id=home / "dcp", no_dist=True)
    (home / "all").mkdir()
    shutil.copy(home / "big.ckpt", home / "all")
    return home


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", MOVING)
def test_progress_counts_every_byte(words: str, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(large, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    bars = []
    close = tqdm.close
    monkeypatch.setattr(tqdm, "close", lambda bar: (bars.append((bar.n, bar.total)), close(bar)))
    assert main(words.split()) in (0, 1)
    shown = terminal.getvalue()
    assert f"{words.split(maxsplit=1)[0]}:" in shown or "load:" in shown or "verify:" in shown
    done, total = bars[0]
    assert done == pytest.approx(total or 16_000_000, rel=0.05)  # the ends of files are read in addition
    terminal.truncate(0)
    assert main(["verify", "dcp", "big", "--quiet"]) == 0
    assert terminal.getvalue().count("\r") == 0


@pytest.mark.parametrize("words", ["cp {source} {target}/", "sync {source} {target}"])
def test_what_a_killed_copy_has_left_goes_when_it_is_made_again(words: str, tmp_path: Path) -> None:
    Checkpointer(strategy="sync").save({"w": torch.ones(3)}, tmp_path / "run" / "a.ckpt")
    target = tmp_path / "new"
    child = os.fork()
    if child == 0:
        LocalStorage().create(str(target / "a.ckpt"), 4).write_at(0, b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(os.listdir(target)) == 1
    assert main(words.format(source=tmp_path / "run", target=target).split()) == 0
    assert os.listdir(target) == ["a.ckpt"]


def test_what_a_killed_export_has_left_is_cleaned_and_one_under_way_stays(tmp_path: Path) -> None:
    for is_killed in (False, True):
        child = os.fork()
        if child == 0:
            with new_directory(tmp_path / "model") as hidden:
                Path(hidden, "w.safetensors").write_bytes(b"half")
                assert main(["clean", str(tmp_path)]) == 0
                if is_killed:
                    os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == (signal.SIGKILL if is_killed else 0)
        if not is_killed:
            assert (tmp_path / "model" / "w.safetensors").read_bytes() == b"half"
            shutil.rmtree(tmp_path / "model")
    assert len(os.listdir(tmp_path)) == 1
    assert main(["clean", str(tmp_path)]) == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("verb", ["cp", "mv"])
def test_what_is_damaged_holds_up_no_copy_of_the_others(verb: str, home: Path, capsys: Capture) -> None:
    flip_bit(home / "run" / "b.ckpt", 10)
    assert main([verb, "run", "new", "--json"]) == 1  # in the order a, b, c: older ones first
    captured = capsys.readouterr()
    assert [entry["target"] for entry in json.loads(captured.out)] == ["new/a.ckpt", "new/c"]
    assert captured.err.count("ckpt: CheckpointCorruptedError") == 1 and str(home / "run" / "b.ckpt") in captured.err
    assert sorted(os.listdir("new")) == ["a.ckpt", "c"]
    assert sorted(os.listdir("run")) == (["b.ckpt"] if verb == "mv" else ["a.ckpt", "b.ckpt", "c"])


@pytest.mark.parametrize("verb", ["cp", "mv"])
def test_what_is_no_checkpoint_holds_up_no_copy_of_the_others(verb: str, home: Path, capsys: Capture) -> None:
    (home / "run" / "0.ckpt").symlink_to("nowhere")
    (home / "run" / "0.txt").write_text("notes")
    (home / "run" / "0").mkdir()
    assert main([verb, *(f"run/{name}" for name in sorted(os.listdir("run"))), "new", "--json"]) == 1
    captured = capsys.readouterr()
    assert [entry["target"] for entry in json.loads(captured.out)] == ["new/a.ckpt", "new/b.ckpt", "new/c"]
    for name in ("0", "0.ckpt", "0.txt"):
        assert captured.err.count(f"run/{name}\n") == 1
    assert "it is a link to nowhere, where nothing is" in captured.err
    assert sorted(os.listdir("new")) == ["a.ckpt", "b.ckpt", "c"]


def test_verify_beside_a_run_calls_nothing_missing_that_was_deleted_meanwhile(home: Path, capsys: Capture) -> None:
    Checkpointer(strategy="sync").save({"w": torch.ones(1_000_000), "step": 9}, home / "run" / "new.ckpt")

    def delete_others(nbytes: int) -> None:
        if nbytes >= 1_000_000:  # by then all are listed, and the tensor of the newest is being compared
            shutil.rmtree(home / "run" / "c", ignore_errors=True)
            (home / "run" / "a.ckpt").unlink(missing_ok=True)

    with counting(delete_others):
        assert main(["verify", "run", "--json"]) == 0
    captured = capsys.readouterr()
    assert {found["path"]: found["state"] for found in json.loads(captured.out)} == {
        "run/new.ckpt": "whole",
        "run/b.ckpt": "whole",
    }
    assert sorted(captured.err.splitlines()) == ["run/a.ckpt was deleted meanwhile", "run/c was deleted meanwhile"]


@pytest.mark.parametrize("name", ["last.ckpt", "stock.ckpt", "last"])
def test_mv_beside_a_run_deletes_nothing_that_was_saved_meanwhile(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    source, target = tmp_path / "run" / name, tmp_path / "new" / name

    def save(step: int) -> None:
        state = {"w": torch.full((3,), float(step))}
        if name == "last":
            DirectoryCheckpointer(strategy="sync").save([Part("model", state, Kind.REPLICATED)], source)
        elif name == "stock.ckpt":  # the file has the same length each time
            source.parent.mkdir(exist_ok=True)
            torch.save(state, source)
        else:
            Checkpointer(strategy="sync").save(state, source)

    def verify(path: str, **options: object) -> object:
        if path == str(target):
            save(2)
        return verified(path, **options)

    save(1)
    verified = loading.verify
    monkeypatch.setattr(loading, "verify", verify)
    assert main(["mv", str(source), str(target)]) == 1
    monkeypatch.undo()
    said = capsys.readouterr().err
    assert f"it was replaced while it was moved: the new checkpoint stays here, the old one is at {target}" in said
    assert "--force" in said
    assert main(["diff", "--json", str(source), str(target)]) == 1, "step 2 and step 1"
    assert main(["mv", "--force", str(source), str(target)]) == 0
    assert not source.exists() and main(["verify", str(target)]) == 0


def saved_in(directory: Path, *names: str) -> list[Path]:
    for step, name in enumerate(names):
        Checkpointer(strategy="sync").save({"step": step}, directory / name)
    return [directory / name for name in names]


def test_prune_deletes_nothing_that_was_saved_while_it_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    saved = saved_in(tmp_path, "a.ckpt", "b.ckpt", "c.ckpt", "d.ckpt")

    def answer(_: object) -> bool:
        Checkpointer(strategy="sync").save({"step": 9}, saved[0])
        assert main(["keep", str(saved[2])]) == 0
        return True

    monkeypatch.setattr(tidying, "agreed", answer)
    assert main(["prune", str(tmp_path), "--keep", "latest=1"]) == 0
    out = capsys.readouterr().out
    assert f"deleted {saved[1]}\n" in out
    assert all(f"kept {saved[index]}: pinned or saved anew meanwhile\n" in out for index in (0, 2))
    assert [path.exists() for path in saved] == [True, False, True, True]


def test_prune_tells_scripts_what_was_saved_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    saved = saved_in(tmp_path, "a.ckpt", "b.ckpt", "c.ckpt")

    def verify(path: str, **options: object) -> object:
        Checkpointer(strategy="sync").save({"step": 9}, saved[0])
        return verified(path, **options)

    size, verified = saved[1].stat().st_size, loading.verify
    monkeypatch.setattr(loading, "verify", verify)
    assert main(["prune", str(tmp_path), "--keep", "latest=1", "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kept = {entry["path"]: entry["kept_because"] for entry in found["checkpoints"]}
    assert kept == {
        str(saved[0]): ["pinned or saved anew meanwhile"],
        str(saved[1]): [],
        str(saved[2]): kept[str(saved[2])],
    }
    assert kept[str(saved[2])] and found["freed"] in range(size, size + 2**16)


def test_sync_deletes_nothing_that_was_saved_while_it_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in ("there/1.ckpt", "there/2.ckpt", "here/3.ckpt"):
        Checkpointer(strategy="sync").save({"name": name}, tmp_path / name)

    def answer(_: object) -> bool:
        Checkpointer(strategy="sync").save({"name": "again"}, tmp_path / "there" / "1.ckpt")
        return True

    monkeypatch.setattr(moving, "agreed", answer)
    assert main(["sync", str(tmp_path / "here"), str(tmp_path / "there"), "--delete"]) == 0
    assert sorted(os.listdir(tmp_path / "there")) == ["1.ckpt", "3.ckpt"]


def test_cp_beside_a_run_leaves_out_what_was_deleted_meanwhile(home: Path, capsys: Capture) -> None:
    def delete_the_newest(_: int) -> None:
        if (home / "new" / "a.ckpt").exists():
            shutil.rmtree(home / "run" / "c", ignore_errors=True)

    with counting(delete_the_newest):
        assert main(["cp", "run", "new", "--json"]) == 0
    captured = capsys.readouterr()
    assert [entry["target"] for entry in json.loads(captured.out)] == ["new/a.ckpt", "new/b.ckpt"]
    assert captured.err == "run/c was deleted meanwhile\n"
    assert sorted(os.listdir("new")) == ["a.ckpt", "b.ckpt"]


@pytest.mark.parametrize("verb", ["ls", "du"])
@pytest.mark.usefixtures("home")
def test_what_is_not_there_hides_none_of_the_others(verb: str, capsys: Capture) -> None:
    assert main([verb, "gone.ckpt", "run/a.ckpt", "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [found["path"] for found in (document["checkpoints"] if verb == "du" else document)] == ["run/a.ckpt"]
    assert "no such file, directory or bucket: gone.ckpt\n" in captured.err


@pytest.mark.parametrize("name", ["a.ckpt", "c"])
def test_ctrl_c_in_a_copy_leaves_nothing_behind(name: str, home: Path) -> None:
    codes = []
    for moment in itertools.count():
        moved = itertools.count()

        def press_ctrl_c(_: int, moved: Iterator[int] = moved, moment: int = moment) -> None:
            if next(moved) == moment:
                signal.raise_signal(signal.SIGINT)

        with counting(press_ctrl_c):
            codes.append(main(["cp", f"run/{name}", "new/"]))
        there = os.listdir(home / "new") if (home / "new").exists() else []
        assert there == ([name] if codes[-1] == 0 or there else [])
        shutil.rmtree(home / "new", ignore_errors=True)
        if codes[-1] == 0:
            break
    assert codes == [130] * (len(codes) - 1) + [0] and len(codes) > 5


@pytest.mark.usefixtures("home")
def test_clean_says_that_there_is_nothing(capsys: Capture) -> None:
    for words, said in (
        (["run"], "nothing was left unfinished in run\n"),
        (["--memory", "run"], "no run that is over has left snapshots in run\n"),
    ):
        assert main(["clean", *words]) == 0
        assert capsys.readouterr() == ("", said)


@pytest.mark.usefixtures("home")
def test_what_prune_would_delete_is_json_also_where_nobody_agrees(capsys: Capture) -> None:
    assert main(["prune", "run", "--keep", "latest=1", "--json"]) == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["deleted"] is False and "--yes deletes" in captured.err
    assert [checkpoint["path"] for checkpoint in document["checkpoints"] if not checkpoint["kept_because"]] == [
        "run/b.ckpt",
        "run/a.ckpt",
    ]
    assert sorted(os.listdir("run")) == ["a.ckpt", "b.ckpt", "c"]


def test_one_file_of_a_directory_has_its_step_and_metadata(tmp_path: Path, capsys: Capture) -> None:
    with DirectoryCheckpointer(strategy="sync") as directories:
        parts = [Part("model", {"w": torch.ones(3)}, Kind.REPLICATED)]
        directories.save(parts, tmp_path / "a", step=7, metadata={"metrics": {"loss": 0.5}, "model": "not the part"})
    for source, target, layout in (("a", "b.ckpt", "file"), ("b.ckpt", "c", "directory")):
        assert main(["convert", str(tmp_path / source), str(tmp_path / target), "--to", layout]) == 0
        capsys.readouterr()
        assert main(["ls", str(tmp_path / target), "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert listed["step"] == 7
        if layout == "file":
            assert listed["metrics"] == {"loss": 0.5}
    assert torch.equal(load_whole(tmp_path / "b.ckpt")["model"]["w"], torch.ones(3))
