from __future__ import annotations

import collections
import fcntl
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import types
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import (
    CheckpointCorruptedError,
    Checkpointer,
    DirectoryCheckpointer,
    Kind,
    Part,
    StorageError,
    __version__,
    catalog,
    verify,
)
from ckpt_core._layouts.torch_file.manifest import FORMAT_VERSION
from ckpt_core._pipeline import loading
from ckpt_core.cli import inspecting, listing, main
from ckpt_core.cli.parser import parse
from ckpt_core.events import size_in_words
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, in_memory
from tests.support.closing import closed_to_this_user
from tests.support.damage import flip_bit


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    checkpointer = Checkpointer(strategy="sync")
    checkpointer.save({"weight": torch.ones(2, 3), "step": 7}, tmp_path / "a.ckpt")
    checkpointer.save({"weight": torch.zeros(2, 3)}, tmp_path / "b.ckpt")
    os.utime(tmp_path / "a.ckpt", (1_000, 1_000))
    return tmp_path


def test_ls_lists_newest_first(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [str(directory / "b.ckpt"), str(directory / "a.ckpt")]


def test_inspect_shows_a_card_and_a_tree(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {f"layers.{index}.weight": torch.ones(4, 4) for index in range(3)}
    state = {"loops": {"fit": {"a": 1, "b": 2}}, "state_dict": layers, "epoch": 3, "global_step": 8}
    Checkpointer(strategy="sync").save(
        {**state, "pytorch-lightning_version": "2.6", "lightning_ckpt": {"version": 1}}, directory / "run.ckpt"
    )
    assert main(["inspect", str(directory / "run.ckpt"), "--depth", "1"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == "kind file"
    assert lines[2].startswith("state committed ")
    assert lines[3:9] == [
        "digests not compared here (--verify)",
        "step 8",
        "epoch 3",
        "framework Lightning 2.6",
        "resume is exact yes",
        "parameters 48 (with buffers)",
    ]
    assert lines[10] == "of these state_dict 192 bytes"
    # the parts that users ask for most come first
    assert lines[12:16] == [
        "state_dict.layers 3 tensors, 192 bytes",
        "epoch: 3",
        "global_step: 8",
        "loops.fit 2 values",
    ]

    assert main(["inspect", str(directory / "run.ckpt"), "--all"]) == 0
    out = capsys.readouterr().out
    assert "  0.weight: float32[4, 4]\n" in out and "  b: 2\n" in out


def test_inspect_of_many_flat_names_shows_a_screen_of_them(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = {f"k{index}": index for index in range(1000)}
    Checkpointer(strategy="sync").save({"flat": flat, "epoch": 3}, directory / "flat.ckpt")
    assert main(["inspect", str(directory / "flat.ckpt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["  k49: 49", "  and 950 more (--all)"] and len(lines) < 70
    assert main(["inspect", str(directory / "flat.ckpt"), "--all"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  k999: 999"


def test_inspect_says_why_a_resume_is_not_exact(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"state_dict": {}, "pytorch-lightning_version": "2.6", "global_step": 1}
    Checkpointer(strategy="sync").save(state, directory / "bare.ckpt")
    assert main(["inspect", "--json", str(directory / "bare.ckpt")]) == 0
    card = json.loads(capsys.readouterr().out)
    assert (card["exact"], card["step"], card["verified"]) == ("no: saved without ResumableCheckpoint", 1, None)
    assert card["entries"]["global_step"] == "1"


@pytest.mark.parametrize(
    ("noted", "exact"),
    [
        ({"notes": [], "changed": {"module": {}}}, "yes"),
        ({"notes": [7], "changed": 1}, "no: 7"),
        ({"changed": ["of another program"]}, "yes"),
        ({"notes": ["a batch was interrupted"], "changed": {"module": {"ema": "1"}}}, "no: a batch was interrupted"),
        (
            {"notes": [], "changed": {"module": {"ema": "1", "best": "2"}}},
            "yes, unless it needs module.ema, module.best, which training had changed and no state holds",
        ),
    ],
)
def test_inspect_says_what_the_run_noted(
    noted: dict[str, object], exact: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"state_dict": {}, "pytorch-lightning_version": "2.6", "lightning_ckpt": {"replicated": noted}}
    Checkpointer(strategy="sync").save(state, directory / "run.ckpt")
    assert main(["inspect", "--json", str(directory / "run.ckpt")]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == exact


def test_inspect_reads_no_tensor_and_verifies_on_demand(directories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directories / "step=1"
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1] + b"x")
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "directory, saved by 1 rank" in out and "not compared here" in out
    assert "model.weight: float32[2, 3]" in out and "metadata.step: 1" in out
    assert main(["inspect", "--verify", str(path)]) == 1
    assert "the bytes of 'model.weight' differ" in capsys.readouterr().err
    assert main(["inspect", "--verify", str(directories / "step=2")]) == 0
    assert "every byte verified" in capsys.readouterr().out


def test_inspect_of_objects_says_what_is_not_plain(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "config": Namespace(a=1), "step": 4}, directory / "stock.ckpt")
    assert main(["inspect", str(directory / "stock.ckpt")]) == 0
    out = capsys.readouterr().out
    assert "argparse.Namespace" in out and "none: another program's" not in out


def test_inspect_of_a_directory_of_checkpoints_names_the_newest(
    directories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(directories)]) == 1
    error = capsys.readouterr().err
    assert f"of 2 checkpoints, not a checkpoint; the newest is {directories / 'step=2'}" in error
    runs = directories / "project" / "runs"
    runs.mkdir(parents=True)
    (directories / "step=2").rename(runs / "step=2")
    assert main(["inspect", str(directories / "project")]) == 1
    error = capsys.readouterr().err
    assert "this is a directory, not a checkpoint: no checkpoints in" in error and "below it, such as in" in error


def test_verify_tells_whole_from_damaged(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(directory)]) == 0
    flip_bit(directory / "a.ckpt", 100)
    assert main(["verify", str(directory)]) == 1
    damaged, whole = sorted(capsys.readouterr().out.splitlines()[2:])
    assert whole == f"whole  {directory / 'b.ckpt'}"
    assert damaged.startswith(f"DAMAGED  {directory / 'a.ckpt'}")


def verdicts(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[dict[str, Any]]]:
    code = main(["verify", "--json", *map(str, paths)])
    return code, json.loads(capsys.readouterr().out)


def test_verify_tells_what_is_wrong_by_words_and_exit_code(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (missing,) = verdicts(capsys, directory / "nope.ckpt")
    assert (code, missing["state"]) == (3, "missing")

    (directory / "empty").mkdir()
    code, (empty,) = verdicts(capsys, directory / "empty")
    assert (code, empty["state"]) == (3, "missing")
    assert empty["message"].startswith("nothing to verify: no checkpoints in ")

    (directory / "notes.txt").write_text("nothing that torch reads")
    code, (foreign,) = verdicts(capsys, directory / "notes.txt")
    assert (code, foreign["state"]) == (4, "foreign")

    torch.save({"step": 9}, directory / "stock.ckpt")
    code, (stock,) = verdicts(capsys, directory / "stock.ckpt")
    assert (code, stock["state"]) == (0, "no digests")

    code, found = verdicts(capsys, *(directory / name for name in ("notes.txt", "nope.ckpt", "a.ckpt", "empty")))
    assert (code, [entry["state"] for entry in found]) == (3, ["foreign", "missing", "whole", "missing"])
    flip_bit(directory / "a.ckpt", 100)
    assert verdicts(capsys, directory / "nope.ckpt", directory / "a.ckpt")[0] == 1


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A directory with what Hugging Face, DCP and stock Accelerate write."""
    layers = {f"layers.{index}.weight": torch.full((64, 64), float(index)) for index in range(3)}
    (tmp_path / "model").mkdir()
    safetensors.torch.save_file(layers, tmp_path / "model" / "model.safetensors")
    dcp.save({"model": layers, "step": 3}, checkpoint_id=tmp_path / "dcp")
    moments = {name: {"exp_avg": torch.ones(64, 64)} for name in list(layers)[:2]}
    dcp.save({"state_dict": layers, "optimizer_0": {"state": moments}}, checkpoint_id=tmp_path / "lightning")
    torch.save({"epoch": 1, "global_step": 3}, tmp_path / "lightning" / "meta.pt")
    (tmp_path / "accelerate").mkdir()
    safetensors.torch.save_file(layers, tmp_path / "accelerate" / "model.safetensors")
    torch.save({"state": {0: {"step": torch.ones(64, 64)}}}, tmp_path / "accelerate" / "optimizer.bin")
    return tmp_path


FOREIGN = {
    "model/model.safetensors": ("a safetensors file", "model/model.safetensors"),
    "model": ("a Hugging Face model, 1 file", "model/model.safetensors"),
    "dcp": ("a checkpoint in DCP's format", "dcp/__0_0.distcp"),
    "lightning": ("a checkpoint in DCP's format, of Lightning", "lightning/__0_0.distcp"),
    "accelerate": ("a checkpoint of stock Accelerate", "accelerate/optimizer.bin"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
@pytest.mark.parametrize("name", FOREIGN)
def test_what_other_programs_wrote_is_named_and_checked_as_far_as_that_goes(
    foreign: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    what, file = FOREIGN[name]
    code, (verdict,) = verdicts(capsys, foreign / name)
    assert (code, verdict["state"]) == (0, "no digests")
    assert verdict["message"].startswith(f"{what}; compared: ")
    assert main(["inspect", "--json", str(foreign / name)]) == 0
    card = json.loads(capsys.readouterr().out)
    assert (card["kind"], card["parameters"]) == (what, 3 * 64 * 64)
    assert {"dtype": "float32", "shape": [64, 64]} in card["entries"].values()
    assert card["entries"].get("step") == ("<an object, not read here>" if name == "dcp" else None)
    assert main(["ls", str(foreign / name)]) == 0
    assert "DAMAGED" not in capsys.readouterr().out

    data = bytearray((foreign / file).read_bytes())
    if file.endswith(".safetensors"):  # has no digests: only truncation is detected
        del data[-1]
    else:
        data[len(data) // 2] ^= 1  # inside a tensor
    (foreign / file).write_bytes(data)
    code, (verdict,) = verdicts(capsys, foreign / name)
    assert (code, verdict["state"], verdict["file"]) == (1, "damaged", str(foreign / file))


def test_verify_names_the_key_of_a_damaged_tensor(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"state_dict": {f"model.layer.{index}.weight": torch.full((100,), index + 0.5) for index in range(3)}}
    Checkpointer(strategy="sync").save(state, directory / "run.ckpt")
    data = (directory / "run.ckpt").read_bytes()
    wanted = torch.full((100,), 1.5).numpy().tobytes()
    assert data.count(wanted) == 1
    (directory / "run.ckpt").write_bytes(data.replace(wanted, wanted[:-1] + b"x"))
    code, (found,) = verdicts(capsys, directory / "run.ckpt")
    assert (code, found["state"], found["key"]) == (1, "damaged", "state_dict.model.layer.1.weight")


def test_what_cannot_be_read_is_not_called_damaged(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "loop.ckpt").symlink_to("loop.ckpt")
    code, (found,) = verdicts(capsys, directory / "loop.ckpt")
    assert (code, found["state"]) == (1, "error")
    (directory / "loop").symlink_to("loop")
    Checkpointer(strategy="sync").save({"weight": torch.ones(1)}, directory / "c.ckpt")  # the loops disturb no one
    assert main(["ls", "-r", str(directory)]) == 0


def test_progress_is_shown_on_a_terminal_and_counts_every_byte(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = io.StringIO()
    monkeypatch.setattr(console, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", console)
    monkeypatch.setenv("TERM", "xterm")
    path = directory / "big.ckpt"
    Checkpointer(strategy="sync").save({"w": torch.zeros(1_000_000)}, path)
    assert main(["verify", str(path)]) == 0
    shown = console.getvalue()
    assert "verify" in shown and f"{path.stat().st_size / 1e6:.1f}" in shown and "1 checkpoint, 4.0 MB in" in shown
    console.truncate(0)
    assert main(["verify", "--quiet", str(path)]) == 0
    assert "\x1b" not in console.getvalue()


@pytest.mark.parametrize("words", [["--json", "ls", "{}"], ["ls", "--json", "{}"], ["ls", "{}", "--json"]])
def test_an_option_of_all_verbs_stands_in_any_place(
    directory: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main([word.format(directory) for word in words]) == 0
    newest, older = json.loads(capsys.readouterr().out)
    assert (newest["path"], newest["state"], newest["kind"]) == (str(directory / "b.ckpt"), "committed", "file")
    assert newest["bytes"] == (directory / "b.ckpt").stat().st_size
    assert (older["step"], newest["step"]) == (7, None)


def test_storage_options_come_together_from_before_and_behind_the_verb() -> None:
    words = ["--storage-options", '{"anon": true}', "ls", "s3://x", "--endpoint-url", "http://here", "--profile", "me"]
    options = parse(words, [listing.add_commands])
    assert options is not None
    assert options.storage_options == {"anon": True, "endpoint_url": "http://here", "profile": "me"}
    bare = parse(["ls"], [listing.add_commands])
    assert bare is not None and bare.storage_options is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspct", "x"], "there is no command 'inspct': did you mean inspect?"),
        (["runs", "ls"], "there is no command 'runs': the command comes before its paths: ckpt ls runs"),
        (["ls", "--jsno"], "did you mean --json?"),
        (["--storage-options", "{", "ls"], "not JSON"),
        (["ls", "--storage-options", "3"], "not a JSON object"),
    ],
)
def test_what_is_misspelt_ends_with_code_2_and_a_suggestion(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_shell_completes_commands_options_and_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, expected in (
        (["pru"], "prune"),
        (["prune", "--k"], "--keep"),
        (["--json", "completion", ""], "bash zsh fish"),
        (["convert", "a", "b", "--to", ""], "file directory dcp safetensors accelerate"),
        (["import", "--format", "s"], "safetensors"),
        (["ls", "x"], ""),
    ):
        line = f"COMP_WORDS=(ckpt {' '.join(map(repr, words))}); COMP_CWORD={len(words)}; _ckpt; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert main(["completion", "fish"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    help_of_prune = "Delete the checkpoints that no rule keeps, and say why the others stay"
    assert ["complete", "-c", "ckpt", "-n", "__fish_use_subcommand", "-f", "-a", "prune", "-d", help_of_prune] in lines
    options = {line[6]: line[7:] for line in lines if line[4:6] == ["__fish_seen_subcommand_from convert", "-l"]}
    layouts = "file directory dcp safetensors accelerate"
    assert options["to"] == ["-x", "-a", layouts, "-d", "the layout"]
    assert options["json"] == ["-d", "print one JSON document"]


def test_without_words_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "\n    verify " in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [(["help"], "usage: ckpt [-h]"), (["help", "ls"], "usage: ckpt ls [-h]")])
def test_help_is_a_command_too(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(said)


def test_it_says_its_version_and_what_formats_it_writes(directories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    written = json.loads((directories / "step=1" / "manifest.json").read_bytes())["version"]
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ckpt {__version__} (formats: file {FORMAT_VERSION}, directory {written})\n"


def test_the_help_does_not_wait_for_torch() -> None:
    program = "import sys; from ckpt_core.cli import main; main(['ls', '--help'])"
    slow = "sorted({'torch', 'numpy', 'stamina'}.intersection(sys.modules))"
    program = f"import atexit, sys; atexit.register(lambda: print({slow})); {program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_a_reader_that_has_ended_is_no_error(directory: Path) -> None:
    # More than a pipe holds, so that the command is still writing when the reader ends.
    Checkpointer(strategy="sync").save({"many": list(range(20_000))}, directory / "many.ckpt")
    program = f"from ckpt_core.cli import main; import sys; sys.exit(main(['inspect', '--all', {str(directory / 'many.ckpt')!r}]))"
    command = f'{sys.executable} -c "$PROGRAM" | head -1; exit ${{PIPESTATUS[0]}}'
    environment = {**os.environ, "PROGRAM": program}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (141, "", 1)


def test_ls_of_what_is_not_there_is_an_error(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("ls", "clean", "inspect"):
        assert main([verb, str(directory / "nope")]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and "there is no such file, directory or bucket" in captured.err


def test_ls_of_a_directory_without_checkpoints_says_so(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "logs").mkdir()
    (directory / "logs" / "notes.txt").write_text("no checkpoint")
    assert main(["ls", str(directory / "logs")]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"no checkpoints in {directory / 'logs'} (1 other file)\n"


def test_ls_reads_no_other_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "src").mkdir()
    for name in ("train.py", "src/model.py", "src/weights.pt"):
        (directory / name).write_text("no checkpoint")
    Checkpointer(strategy="sync").save({"step": 3}, directory / "src" / "c.ckpt")
    read, stamp_of = list[str](), catalog.stamp_of

    def note(path: str, **options: Any) -> Any:
        read.append(os.path.relpath(path, directory))
        return stamp_of(path, **options)

    monkeypatch.setattr(catalog, "stamp_of", note)
    assert main(["ls", "-R", str(directory)]) == 0
    assert sorted(read) == ["a.ckpt", "b.ckpt", "src/c.ckpt"]


def test_ls_points_to_checkpoints_below_and_lists_them(directories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = directories / "runs" / "a"
    runs.mkdir(parents=True)
    Checkpointer(strategy="sync").save({"step": 3}, runs / "last.ckpt")
    assert main(["ls", str(directories / "runs")]) == 0
    assert f"1 below it, such as in {runs}: ckpt ls -R {directories / 'runs'}" in capsys.readouterr().err
    assert main(["ls", "-r", str(directories), "--json"]) == 0
    names = [os.path.relpath(found["path"], directories) for found in json.loads(capsys.readouterr().out)]
    assert names == ["step=2", "step=1", "runs/a/last.ckpt"]


def test_links_that_lead_round_in_a_circle_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        Checkpointer(strategy="sync").save({"step": 3}, tmp_path / "runs" / name / f"{name}.ckpt")
        (tmp_path / "runs" / name / "up").symlink_to("..")
        (tmp_path / "runs" / name / "other").symlink_to(f"../{other}")
        (tmp_path / "runs" / name / "outside").symlink_to(tmp_path)
    assert main(["ls", "-R", str(tmp_path / "runs"), "--json"]) == 0
    names = [os.path.relpath(found["path"], tmp_path / "runs") for found in json.loads(capsys.readouterr().out)]
    assert names == ["a/a.ckpt", "a/other/b.ckpt", "b/b.ckpt", "b/other/a.ckpt"]


def test_a_hint_looks_into_no_more_than_some_directories_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpointer(strategy="sync").save({"step": 3}, tmp_path / "0" / "a.ckpt")
    for number in range(1, 600):
        (tmp_path / str(number)).mkdir()
    Checkpointer(strategy="sync").save({"step": 3}, tmp_path / "999" / "a.ckpt")  # the last one in listing order
    assert main(["ls", str(tmp_path)]) == 0
    assert f"; 1 or more below it, such as in {tmp_path / '0'}: " in capsys.readouterr().err
    assert main(["ls", "-r", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("instead", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_a_directory_whose_manifest_is_no_file_is_damaged(
    instead: Callable[[Path], None], directories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = directories / "step=1"
    (checkpoint / "manifest.json").unlink()
    instead(checkpoint / "manifest.json")
    for path in (checkpoint, directories):
        assert main(["ls", str(path)]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.endswith(str(checkpoint)))
        assert "DAMAGED" in line and " 0 B " not in line
        assert main(["verify", str(path), "--json"]) == 1
        states = {found["path"]: found["state"] for found in json.loads(capsys.readouterr().out)}
        assert states[str(checkpoint)] == "damaged"


@pytest.mark.parametrize("name", ["a.ckpt", "step=1", "./step=1/"])
def test_ls_of_a_checkpoint_lists_it(
    directory: Path, directories: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(directory)
    assert main(["ls", name]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert os.path.normpath(line.split()[-1]) == os.path.normpath(name)


def test_ls_says_what_state_a_checkpoint_is_in(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"step": 9}, directory / "stock.ckpt")
    (directory / "b.ckpt").write_bytes((directory / "b.ckpt").read_bytes()[:-7])
    assert main(["ls", str(directory), "--json"]) == 0
    found = {os.path.basename(entry["path"]): entry["state"] for entry in json.loads(capsys.readouterr().out)}
    assert found == {"a.ckpt": "committed", "b.ckpt": "damaged", "stock.ckpt": "no digests"}


def test_errors_are_one_message_and_exit_code_1(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory / "missing.ckpt")]) == 1
    assert "CheckpointNotFoundError" in capsys.readouterr().err


def test_clean_deletes_orphans_only(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orphan = directory / ".c.ckpt.0123456789ab.ckpt-part"
    orphan.write_bytes(b"half")
    assert main(["clean", str(directory), "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would delete {orphan}\n" and orphan.exists()
    assert main(["clean", str(directory)]) == 0
    assert capsys.readouterr().out == f"deleted {orphan}\n"
    assert sorted(path.name for path in directory.iterdir()) == ["a.ckpt", "b.ckpt"]


def test_clean_deletes_nothing_that_is_being_written_or_gets_its_name_back(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / ".step=3.0123456789ab-replaced.ckpt-part").mkdir()
    locked = directory / ".c.ckpt.0123456789ab.ckpt-part"
    with locked.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for dry_run in (["--dry-run"], []):
            assert main(["clean", str(directory), *dry_run]) == 0
            assert capsys.readouterr().out == ""
    assert locked.exists() and (directory / "step=3").is_dir()


@pytest.fixture
def directories(tmp_path: Path) -> Path:
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        for step in (1, 2):
            parts = [Part("model", {"weight": torch.ones(2, 3)}, Kind.REPLICATED)]
            checkpointer.save(parts, tmp_path / f"step={step}", metadata={"step": step})
            os.utime(tmp_path / f"step={step}" / "manifest.json", (step, step))
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    return tmp_path


def test_directories_are_checkpoints_too(directories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(directories)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [str(directories / "step=2"), str(directories / "step=1")]

    assert main(["verify", str(directories)]) == 0
    data = (directories / "step=1" / "model.safetensors").read_bytes()
    (directories / "step=1" / "model.safetensors").write_bytes(data[:-1] + b"x")
    assert capsys.readouterr().out.count("whole") == 2
    assert main(["verify", str(directories / "step=1"), str(directories / "step=2")]) == 1
    damaged, whole = capsys.readouterr().out.splitlines()
    assert damaged.startswith(f"DAMAGED  {directories / 'step=1'}")
    assert whole == f"whole  {directories / 'step=2'}"


def test_clean_deletes_unfinished_directories(directories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orphan = directories / ".step=3.0123456789ab-0-3.ckpt-part"
    orphan.mkdir()
    (orphan / "model.safetensors").write_bytes(b"half")
    assert main(["clean", str(directories)]) == 0
    assert capsys.readouterr().out == f"deleted {orphan}\n"
    assert sorted(path.name for path in directories.iterdir()) == ["logs", "notes.txt", "step=1", "step=2"]


# ---- diff and doctor


def test_diff_names_what_differs_and_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = Checkpointer(strategy="sync")
    nan = float("nan")
    one = {"same": torch.tensor([nan, 1.0]), "w": torch.zeros(4), "step": 1, "loss": nan, "gone": 1, "d": torch.ones(1)}
    one["count"] = torch.tensor(30)
    other = {**one, "w": torch.tensor([0.0, 0.0, 0.5, 0.0]), "step": 2, "new": "x", "d": torch.ones(1).double()}
    other["count"] = torch.tensor(40)
    del other["gone"]
    files.save(one, tmp_path / "a.ckpt")
    files.save(other, tmp_path / "b.ckpt")
    assert main(["diff", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "only_first": {"gone": "1"},
        "only_second": {"new": "'x'"},
        "differ": {
            "w": "float32[4], 1 of 4 elements differ, by up to 0.5",
            "step": "1 and 2",
            "d": "float32[1] and float64[1]",
            "count": "int64[], 30 and 40",
        },
        "same": 2,
    }
    assert main(["diff", str(tmp_path / "a.ckpt"), str(tmp_path / "a.ckpt")]) == 0
    assert main(["diff", str(tmp_path / "a.ckpt"), str(tmp_path / "nope")]) == 2


@pytest.mark.parametrize("turned", [False, True])
def test_diff_finds_a_model_that_was_exported_alone(
    turned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"net.0.weight": torch.ones(2, 2), "net.0.bias": torch.zeros(2)}
    Checkpointer(strategy="sync").save({"state_dict": layers, "step": 3}, tmp_path / "a.ckpt")
    (tmp_path / "model").mkdir()
    model = {name.removeprefix("net."): tensor + 0.5 * name.endswith("bias") for name, tensor in layers.items()}
    safetensors.torch.save_file(model, tmp_path / "model" / "model.safetensors")
    paths = [str(tmp_path / "a.ckpt"), str(tmp_path / "model")]
    assert main(["diff", "--json", *(reversed(paths) if turned else paths)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found["differ"]) == ["state_dict.net.0.bias"]
    assert (found["only_second" if turned else "only_first"], found["same"]) == ({"step": "3"}, 1)


def test_diff_takes_an_exported_model_for_that_with_most_of_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"a.net.w": torch.zeros(2), "ema.w": torch.ones(2), "z.net.w": torch.zeros(2)}
    Checkpointer(strategy="sync").save({"state_dict": names}, tmp_path / "a.ckpt")
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "ema.safetensors")
    assert main(["diff", "--json", str(tmp_path / "a.ckpt"), str(tmp_path / "ema.safetensors")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (list(found["only_first"]), found["same"]) == (["state_dict.a.net.w", "state_dict.z.net.w"], 1)


def test_diff_renames_nothing_of_two_models_or_of_a_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, state in (
        ("a", {"model": {"w": torch.ones(2)}}),
        ("b", {"ema": {"w": torch.ones(2)}}),
        ("c", {"model": 1}),
    ):
        Checkpointer(strategy="sync").save(state, tmp_path / f"{name}.ckpt")
    for name, key in (("d", "net.w"), ("e", "w")):
        safetensors.torch.save_file({key: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    for first, second, keys in (
        ("a.ckpt", "b.ckpt", ["model.w", "ema.w"]),
        ("b.ckpt", "c.ckpt", ["ema.w", "model"]),
        ("d.safetensors", "e.safetensors", ["model.net.w", "model.w"]),
    ):
        assert main(["diff", "--json", str(tmp_path / first), str(tmp_path / second)]) == 1
        found = json.loads(capsys.readouterr().out)
        assert [*found["only_first"], *found["only_second"]] == keys


@pytest.mark.parametrize(
    "words",
    ["ls .", "inspect a.ckpt", "verify . notes", "diff a.ckpt b.ckpt", "prune . --keep latest=1 -n"],
)
def test_a_narrow_terminal_breaks_lines_between_words(
    words: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("NO_COLOR", "1")
    for module in (listing, inspecting):
        monkeypatch.setattr(module, "age", lambda _: "now")
    (directory / "notes").write_text("no checkpoint")
    told = {"best": 0.25, "text": "many words, all of them short, that do not fit into a line of this terminal"}
    Checkpointer(strategy="sync").save({"weight": torch.ones(2, 3), **told}, directory / "a.ckpt")
    main(words.split())
    piped = capsys.readouterr().out
    for columns in (200, 53):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        main(words.split())
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= columns
        assert shown.split() == piped.split()
    assert len(shown.splitlines()) > len(piped.splitlines())


def test_the_sign_of_a_difference_stays_with_a_key_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    for name, state in (("a", {"k" * 50: 1}), ("b", {})):
        Checkpointer(strategy="sync").save(state, tmp_path / name)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [f"- {'k' * 50}:", "    1"]


@pytest.mark.parametrize("words", ["ls .", "inspect run", "verify run", "convert run run.ckpt --to file"])
def test_a_program_that_calls_it_sees_what_it_saves(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    may_commit = threading.Event()
    storage = FaultyStorage(LocalStorage(), [Fault("commit", until=may_commit)])
    with DirectoryCheckpointer(storage=storage) as checkpointer:
        checkpointer.save([Part("model", {"w": torch.ones(300_000)}, Kind.REPLICATED)], "run")
        threading.Timer(0.5, may_commit.set).start()
        assert main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (found,) = found if isinstance(found, list) else [found]
    assert os.path.basename(found["path"]) in ("run", "run.ckpt")


@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*Sparse.*", "ignore:.*TypedStorage.*")
def test_diff_and_inspect_take_what_is_more_than_its_elements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = torch.eye(64)
    odd = torch.zeros(5).as_strided((1, 1), (7, 9))
    state = {
        "model": {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "lazy": torch.nn.UninitializedParameter()},
        "quantized": torch.quantize_per_tensor(dense, 0.5, 1, torch.quint8),
        "meta": torch.empty(3, device="meta"),
        "storage": torch.ones(3).untyped_storage(),
        "odd": odd,
        "integer": 10**5000,
    }
    Checkpointer(strategy="sync").save(state, tmp_path / "a.ckpt")
    assert main(["diff", "--allow-pickle", str(tmp_path / "a.ckpt"), str(tmp_path / "a.ckpt")]) == 0
    del state["model"]["lazy"], state["integer"]
    Checkpointer(strategy="sync").save(state, tmp_path / "a.ckpt")
    capsys.readouterr()
    assert main(["inspect", "--all", str(tmp_path / "a.ckpt")]) == 0
    out = capsys.readouterr().out
    assert "coo: float32[64, 64]" in out
    assert "csr: float32[64, 64]" in out
    assert "storage: a storage of 12 bytes" in out
    assert main(["inspect", "--all", "--json", str(tmp_path / "a.ckpt")]) == 0
    assert json.loads(capsys.readouterr().out)["entries"]["model.coo"] == {"dtype": "float32", "shape": [64, 64]}


@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*Sparse.*")
def test_diff_sees_what_python_does_not_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state(change: int) -> dict[str, Any]:
        numbers = torch.arange(4000.0)
        numbers[2000] += change
        texts = numpy.arange(4000).astype(str)
        texts[2000] = str(2000 + change)
        return {
            "quantized": torch.quantize_per_tensor(numbers, 20.0, 0, torch.qint32),
            "sparse": numbers.to_sparse(),
            "csr": numbers.view(1, -1).to_sparse_csr(),
            "texts": texts,
            "swapped": numbers.numpy().astype(">f4"),
            "set": {f"{number}" for number in range(change)},
            "holder": types.SimpleNamespace(x=numbers),
            "same": types.SimpleNamespace(x=torch.arange(4000.0)),
            "queue": collections.deque([torch.arange(9.0)[3:], "a"]),
        }

    for name, change in (("a", 0), ("b", 40)):
        Checkpointer(strategy="sync").save(state(change), tmp_path / name)
    trusted = ["diff", "--json", "--allow-pickle", str(tmp_path / "a")]
    assert main([*trusted, str(tmp_path / "b")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert sorted(found["differ"]) == ["csr", "holder", "quantized", "set", "sparse", "swapped", "texts"]
    assert found["same"] == 2
    assert main([*trusted, str(tmp_path / "a")]) == 0


def test_diff_takes_a_queue_in_a_file_for_that_in_a_directory(tmp_path: Path) -> None:
    queue = {"model": {"x": collections.deque([torch.arange(9.0)[3:], "a", 2**70], maxlen=5)}}
    Checkpointer(strategy="sync").save(queue, tmp_path / "a.ckpt")
    DirectoryCheckpointer(strategy="sync").save([Part("model", queue["model"], Kind.REPLICATED)], tmp_path / "a")
    assert main(["diff", "--allow-pickle", str(tmp_path / "a.ckpt"), str(tmp_path / "a")]) == 0


def test_diff_takes_what_is_shared_for_what_is_not(tmp_path: Path) -> None:
    betas = (0.9, 0.95)
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"groups": [{"betas": betas}, {"betas": betas}]}, tmp_path / "a.ckpt")
        checkpointer.save({"groups": [{"betas": (0.9, 0.95)}, {"betas": betas}]}, tmp_path / "b.ckpt")
    assert main(["diff", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]) == 0


def test_diff_takes_a_shared_list_in_a_file_for_those_in_a_directory(tmp_path: Path) -> None:
    shared: list[Any] = [torch.ones(2), {"b": 1}]
    shared.append({"again": shared[1]})
    state = {"x": shared, "y": shared}
    Checkpointer(strategy="sync").save({"model": state}, tmp_path / "a.ckpt")
    DirectoryCheckpointer(strategy="sync").save([Part("model", state, Kind.REPLICATED)], tmp_path / "a")
    assert main(["diff", str(tmp_path / "a.ckpt"), str(tmp_path / "a")]) == 0
    shared.append(shared)
    Checkpointer(strategy="sync").save({"model": state}, tmp_path / "b.ckpt")
    assert main(["diff", str(tmp_path / "b.ckpt"), str(tmp_path / "b.ckpt")]) == 0


def test_diff_refuses_more_places_than_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.tree._MOST_REPEATS", 10_000)  # instead of a million, which takes seconds
    state: list[Any] = [1]
    for _ in range(40):
        state = [state, state]
    Checkpointer(strategy="sync").save({"model": state}, tmp_path / "a.ckpt")
    assert main(["diff", str(tmp_path / "a.ckpt"), str(tmp_path / "a.ckpt")]) == 2
    assert "the same lists or dictionaries in more than 10,000 places" in capsys.readouterr().err


def test_diff_sees_bits_that_compare_as_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, zero in (("a", 0.0), ("b", -0.0)):
        Checkpointer(strategy="sync").save({"w": torch.tensor(zero)}, tmp_path / name)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint8])
def test_diff_takes_tensors_of_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    for name, value in (("a", 0), ("b", 1)):
        Checkpointer(strategy="sync").save({"w": torch.full((3,), value).to(dtype)}, tmp_path / name)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0


def test_doctor_measures_a_place_and_leaves_nothing(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cgroup = tmp_path_factory.mktemp("cgroup")
    (cgroup / "max").write_text(str(10 * 2**20))
    (cgroup / "used").write_text(str(9 * 2**20))
    monkeypatch.setattr(in_memory, "_CGROUPS", [(str(cgroup / "max"), str(cgroup / "used"), "inactive_file")])
    assert main(["doctor", str(tmp_path), "--size", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == torch.__version__
    assert found["written"] > 0 and found["read"] > 0 and found["free"] > 0
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor", str(tmp_path), "--size", "1", "--bytes", "10GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cost = found["predicted"]
    assert cost["bytes"] == 10**10
    assert cost["memory_available"] == 2**20  # of this container, not of the machine
    assert cost["durable"] == pytest.approx(found["smallest"] + 10**10 / found["written"])
    assert cost["stall"] == pytest.approx(found["smallest_stall"] + 10**10 / found["staged"])
    Checkpointer(strategy="sync").save({"w": torch.ones(1000)}, tmp_path / "a.ckpt")
    assert main(["doctor", str(tmp_path), "--size", "1", "--like", str(tmp_path / "a.ckpt")]) == 0
    assert f"a save of {size_in_words((tmp_path / 'a.ckpt').stat().st_size)}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    assert main(["doctor", str(tmp_path / "nope")]) == 1
    assert "there is no such directory" in capsys.readouterr().err


# ---- errors of conversions name what can be converted


def test_a_file_that_is_given_for_a_directory_is_told_what_to_do(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = str(directory / "a.ckpt"), str(directory / "t")
    assert main(["import", file, target, "--format", "dcp"]) == 1
    error = capsys.readouterr().err
    assert "give the directory that dcp.save wrote" in error
    assert not Path(target).exists()


def test_convert_finds_the_prefix_of_a_model_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"state_dict": {"model.a": torch.ones(2), "model.b.c": torch.zeros(3)}}
    Checkpointer(strategy="sync").save(state, tmp_path / "last.ckpt")
    words = ["convert", str(tmp_path / "last.ckpt"), "--to", "safetensors"]
    assert main([*words, str(tmp_path / "cut")]) == 0
    assert "left 'model.' out of the tensors' names" in capsys.readouterr().err
    assert set(safetensors.torch.load_file(tmp_path / "cut" / "model.safetensors")) == {"a", "b.c"}
    exported = ["export", str(tmp_path / "last.ckpt"), str(tmp_path / "exported"), "--format", "safetensors"]
    assert main(exported) == 0
    assert set(safetensors.torch.load_file(tmp_path / "exported" / "model.safetensors")) == {"a", "b.c"}
    assert main([*words, str(tmp_path / "whole"), "--prefix", ""]) == 0
    assert set(safetensors.torch.load_file(tmp_path / "whole" / "model.safetensors")) == {"model.a", "model.b.c"}
    adapters = {f"base_model.model.{name}.lora_A.weight": torch.ones(2) for name in "ab"}  # as PEFT saves them
    Checkpointer(strategy="sync").save({"model": adapters}, tmp_path / "adapters.ckpt")
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "adapters.ckpt"), "--to", "safetensors", str(tmp_path / "of_peft")]) == 0
    assert "out of the tensors' names" not in capsys.readouterr().err
    assert set(safetensors.torch.load_file(tmp_path / "of_peft" / "model.safetensors")) == set(adapters)


def test_parts_become_keys_of_a_file_and_keys_become_parts(directories: Path, tmp_path: Path) -> None:
    file, back = tmp_path / "one.pt", tmp_path / "back"
    assert main(["convert", str(directories / "step=1"), str(file), "--to", "file"]) == 0
    found = torch.load(file, weights_only=True)
    assert found["step"] == 1 and torch.equal(found["model"]["weight"], torch.ones(2, 3))
    assert found.keys() == {"step", "model"}
    assert main(["diff", str(directories / "step=1"), str(file)]) == 0
    assert main(["convert", str(file), str(back), "--to", "directory"]) == 0
    assert main(["diff", str(file), str(back)]) == 0


def test_diff_shows_first_what_people_ask_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {f"layer.{index}": torch.zeros(3) for index in range(12)}
    for number, name in enumerate(("a", "b")):
        state = {
            "loops": {f"counter_{index}": number for index in range(3)},
            "global_step": number,
            "optimizer_states": [{"state": {0: {"exp_avg": torch.full((3,), float(number))}}}],
            "state_dict": {**{key: weight + number for key, weight in weights.items()}, name: torch.zeros(1)},
        }
        Checkpointer(strategy="sync").save(state, tmp_path / name)
    words = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split(":")[0] for line in lines]
    assert shown[:10] == [f"~ state_dict.layer.{index}" for index in range(10)]
    assert shown[10] == "  and 4 more of state_dict (--all)"
    assert shown[11].startswith("~ optimizer_states.0.state.0.exp_avg")
    assert lines[12:] == [
        "~ global_step: 0 and 1",
        *(f"~ loops.counter_{index}: 0 and 1" for index in range(3)),
        f"0 keys the same, 17 differ, 1 only in {words[1]}, 1 only in {words[2]}",
    ]
    assert main([*words, "--all"]) == 1
    every = capsys.readouterr().out.splitlines()
    assert every[12:14] == ["- state_dict.a: float32[1]", "+ state_dict.b: float32[1]"]


# ---- paths and arguments that the user did not mean


def test_a_directory_of_ours_without_its_manifest_is_no_model(
    directories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directories / "step=2"
    (path / "manifest.json").unlink()
    assert main(["verify", str(path)]) == 1
    assert (
        "DAMAGED" in (said := capsys.readouterr().out)
        and "written last: it was copied in part, or somebody has deleted it" in said
    )
    assert main(["convert", str(path), str(directories / "new"), "--to", "directory"]) == 1
    assert "it has no manifest.json" in capsys.readouterr().err
    assert not (directories / "new").exists()


def test_a_checkpoint_is_no_directory_in_which_nothing_is(
    directory: Path, directories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (directory / "a.ckpt", directories / "step=2"):
        assert main(["latest", str(path)]) == 1  # and not 3, at which scripts start from the beginning
        assert f"ckpt latest {path.parent}" in capsys.readouterr().err
    assert main(["clean", str(directory / "a.ckpt")]) == 1
    (directories / "runs" / "a").mkdir(parents=True)
    (directories / "step=1").rename(directories / "runs" / "a" / "step=1")
    assert main(["latest", str(directories / "runs")]) == 3
    assert "below it, such as in" in capsys.readouterr().err


def test_ls_has_the_words_of_verify_for_what_cannot_be_read(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "a.ckpt").write_bytes(b"")
    (directory / "b.ckpt").write_text("hello")
    (directory / "c.safetensors").write_bytes(b"x" * 100)
    paths = [str(directory), str(directory / "c.safetensors")]
    words = {"a.ckpt": "DAMAGED", "b.ckpt": "FOREIGN", "c.safetensors": "DAMAGED"}
    assert main(["verify", *paths]) == 1
    verified = {
        Path(line.split(": ")[0].split()[1]).name: line.split()[0] for line in capsys.readouterr().out.splitlines()
    }
    assert main(["ls", *paths]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["ls", *paths, "--json"]) == 0
    states = {Path(each["path"]).name: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert verified == words and states == {name: word.lower() for name, word in words.items()}
    assert {Path(line[-1]).name: next(word for word in line if word.isupper()).rstrip(",") for line in listed} == words


needs_users = pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")


@pytest.fixture
def runs(directories: Path, anyones_path: Path) -> Path:
    """Two checkpoints in a directory that every user may reach."""
    for name in ("step=1", "step=2"):
        shutil.copytree(directories / name, anyones_path / "runs" / name)
    return anyones_path / "runs"


@needs_users
def test_a_checkpoint_is_shown_whatever_lies_beside_it(
    directories: Path, anyones_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(directories / "step=1", anyones_path / "step=1")
    (anyones_path / "closed").mkdir()
    with closed_to_this_user(anyones_path / "closed"):
        for verb in ("inspect", "verify", "du"):
            assert main([verb, str(anyones_path / "step=1")]) == 0
        capsys.readouterr()
        assert main(["doctor", str(anyones_path / "closed"), "--size", "1"]) == 1
    assert "cannot write the checkpoint: Permission denied" in capsys.readouterr().err


@needs_users
def test_a_checkpoint_is_shown_from_a_directory_that_may_be_entered_but_not_listed(
    directories: Path, anyones_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = anyones_path / "runs"
    shutil.copytree(directories / "step=1", runs / "step=1")
    Checkpointer(strategy="sync").save({"step": 3, "weight": torch.ones(1)}, runs / "a.ckpt")
    (runs / "b.ckpt").write_bytes(bytes(1000))
    paths = [str(runs / name) for name in ("step=1", "a.ckpt", "b.ckpt")]
    assert main(["keep", paths[1]]) == 0
    capsys.readouterr()
    assert main(["ls", "--json", *paths]) == 0
    listed = capsys.readouterr().out
    with closed_to_this_user(runs, mode=0o711):
        assert main(["ls", "--json", *paths]) == 0
        assert capsys.readouterr().out == listed
        for verb in ("inspect", "verify", "du"):
            assert [main([verb, path]) for path in paths[:2]] == [0, 0]


@needs_users
def test_ls_names_a_directory_that_it_may_not_read_and_lists_the_rest(
    directories: Path, anyones_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = anyones_path / "runs"
    for name in ("closed", "open"):
        (runs / name).mkdir(parents=True)
    shutil.copytree(directories / "step=1", runs / "open" / "step=1")
    shutil.copytree(directories / "step=2", runs / "closed" / "step=2")
    with closed_to_this_user(runs / "closed"):
        assert main(["ls", "-r", str(runs)]) == 1
        captured = capsys.readouterr()
        assert main(["ls", str(runs)]) == 1
        hint = capsys.readouterr().err
    assert [line.split()[-1] for line in captured.out.splitlines()] == [str(runs / "open" / "step=1")]
    for said in (captured.err, hint):
        assert said.count("ckpt: StorageError: cannot list the checkpoint: Permission denied") == 1
        assert f"  file: {runs / 'closed'}\n" in said
    assert f"1 below it, such as in {runs / 'open'}" in hint
    shutil.rmtree(runs / "open")
    for verb in ("ls", "du"):
        with closed_to_this_user(runs / "closed"):
            assert main([verb, "-r", str(runs)]) == 1
        assert "no checkpoints in or below" not in capsys.readouterr().err, "of what is closed nobody knows"


@needs_users
def test_what_lies_beside_a_directory_that_may_not_be_read_is_verified_and_counted(
    runs: Path, anyones_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closed_to_this_user(runs / "step=2"):
        assert main(["verify", "--json", str(runs)]) == 1
        verdicts = json.loads(capsys.readouterr().out)
        assert main(["du", "--json", str(runs)]) == 1
        counted = capsys.readouterr()
        assert main(["inspect", str(runs)]) == 1
        said = capsys.readouterr().err
    (runs / "step=1").rename(anyones_path / "step=1")
    with closed_to_this_user(runs / "step=2"):
        assert main(["verify", str(runs)]) == 1
    alone = capsys.readouterr().out
    assert {verdict["path"]: verdict["state"] for verdict in verdicts} == {
        str(runs / "step=1"): "whole",
        str(runs / "step=2"): "error",
    }
    assert [found["path"] for found in json.loads(counted.out)["checkpoints"]] == [str(runs / "step=1")]
    assert f"  file: {runs / 'step=2'}\n" in counted.err
    assert f"a directory of 1 checkpoint, not a checkpoint; the newest is {runs / 'step=1'}" in said
    assert alone == f"ERROR  {runs / 'step=2'}: cannot list the checkpoint: Permission denied\n"


@needs_users
def test_sync_copies_what_lies_beside_a_directory_that_may_not_be_read_and_deletes_nothing(
    runs: Path, anyones_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = anyones_path / "copy"
    assert main(["sync", str(runs), str(copy)]) == 0
    shutil.rmtree(copy / "step=1")
    for path in (copy, copy / "step=2"):
        path.chmod(0o777)
    with closed_to_this_user(runs / "step=2"):
        capsys.readouterr()
        assert main(["sync", "--json", "--delete", "--yes", str(runs), str(copy)]) == 1
        done = {step["path"]: (step["action"], step["why"]) for step in json.loads(capsys.readouterr().out)}
    assert done[str(runs / "step=1")] == ("copy", "")
    assert done[str(runs / "step=2")][0] == "FAILED"
    assert done[str(runs / "step=2")][1].startswith("cannot list the checkpoint: Permission denied; ")
    assert sorted(os.listdir(copy)) == ["step=1", "step=2"]
    assert main(["verify", str(copy)]) == 0


@needs_users
def test_prune_deletes_nothing_where_it_cannot_read_everything(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Checkpointer(strategy="sync").save({"step": 3, "weight": torch.ones(1)}, runs / "step=3.ckpt")
    runs.chmod(0o777)
    (runs / "step=1").chmod(0o777)
    assert main(["prune", str(runs), "--keep", "latest=1", "--dry-run"]) == 0  # also imports what that user may not
    for closed in (runs / "step=2", runs / "step=3.ckpt"):
        with closed_to_this_user(closed):
            capsys.readouterr()
            assert main(["prune", str(runs), "--keep", "latest=1", "--yes"]) == 1
            captured = capsys.readouterr()
            assert main(["clean", str(runs)]) == 0, "which only what is unfinished is of matter to"
        assert captured.out == ""
        assert f"  file: {closed}\n" in captured.err
        assert f"prune: nothing was deleted, because not all of {runs} could be read\n" in captured.err
    assert sorted(os.listdir(runs)) == ["step=1", "step=2", "step=3.ckpt"]


def test_prune_deletes_nothing_where_the_newest_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        Checkpointer(strategy="sync").save({"step": step, "weight": torch.ones(1000)}, tmp_path / f"{step}.ckpt")
    content = bytearray((tmp_path / "2.ckpt").read_bytes())
    content[content.index(torch.ones(2).numpy().tobytes())] ^= 1  # in the tensor: the manifest shows nothing
    (tmp_path / "2.ckpt").write_bytes(content)
    assert main(["prune", str(tmp_path), "--keep", "latest=1", "--yes"]) == 1
    said = capsys.readouterr().err
    assert f"  file: {tmp_path / '2.ckpt'}\n" in said
    assert f"because the newest checkpoint {tmp_path / '2.ckpt'} does not verify: move it away first" in said
    assert main(["prune", str(tmp_path), "--keep", "latest=1", "--yes", "--json"]) == 1
    assert str(tmp_path / "2.ckpt") in json.loads(capsys.readouterr().out)["error"]["message"]
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt"]
    (tmp_path / "2.ckpt").unlink()
    assert main(["prune", str(tmp_path), "--keep", "latest=1", "--yes"]) == 0


@pytest.mark.parametrize("damaged", ["2.ckpt", "last.ckpt"])
def test_prune_deletes_where_a_copy_of_the_newest_is_intact(damaged: str, tmp_path: Path) -> None:
    for step in (1, 2):
        Checkpointer(strategy="sync").save({"step": step, "weight": torch.ones(1000)}, tmp_path / f"{step}.ckpt")
    shutil.copy(tmp_path / "2.ckpt", tmp_path / "last.ckpt")
    content = (tmp_path / damaged).read_bytes()
    (tmp_path / damaged).write_bytes(content.replace(torch.ones(2).numpy().tobytes(), bytes(8), 1))
    with pytest.raises(CheckpointCorruptedError):
        verify(tmp_path / damaged)
    assert main(["prune", str(tmp_path), "--keep", "latest=1", "--yes"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["2.ckpt", "last.ckpt"]


def test_prune_calls_nothing_damaged_that_could_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        Checkpointer(strategy="sync").save({"step": step}, tmp_path / f"{step}.ckpt")

    def fail(path: str, **_: Any) -> None:
        raise StorageError("the network is away", path=path)

    monkeypatch.setattr(loading, "verify", fail)
    assert main(["prune", str(tmp_path), "--keep", "latest=1", "--yes"]) == 1
    newest = tmp_path / "2.ckpt"
    said = f"nothing was deleted, because the newest checkpoint {newest} could not be read: run the command again"
    assert said in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt"]


@needs_users
def test_clean_names_what_it_may_not_delete(anyones_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = anyones_path / "runs"
    closed, left = runs / ".step=1.0123.ckpt-part", runs / ".step=2.0123.ckpt-part"
    for path in (closed, left):
        path.mkdir(parents=True)
    for path in (runs, closed, left):
        path.chmod(0o777)
    assert main(["clean", "--dry-run", str(runs)]) == 0  # also imports what that user may not
    for arguments in (["--dry-run"], []):
        with closed_to_this_user(closed):
            capsys.readouterr()
            assert main(["clean", "--json", *arguments, str(runs)]) == 1
            captured = capsys.readouterr()
        assert json.loads(captured.out) == [str(left)]
        assert captured.err == f"ckpt clean: {closed} stays: this user may not read or delete it\n"
    assert os.listdir(runs) == [closed.name]
    with closed_to_this_user(runs, mode=0o555):
        capsys.readouterr()
        assert main(["clean", "--dry-run", str(runs)]) == 1
        captured = capsys.readouterr()
    assert captured.out == "" and str(closed) in captured.err


@needs_users
def test_latest_says_which_directory_it_could_not_read_and_starts_nothing_anew(
    runs: Path, anyones_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with closed_to_this_user(runs / "step=2"):
        assert main(["latest", str(runs)]) == 0
        older = capsys.readouterr()
    (runs / "step=1").rename(anyones_path / "step=1")
    with closed_to_this_user(runs / "step=2"):
        assert main(["latest", str(runs)]) == 1, "a script takes 3 for a first start"
        none = capsys.readouterr()
    assert older.out == f"{runs / 'step=1'}\n"
    reason = "cannot read the checkpoint: Permission denied"
    passed_over = f"passed over the checkpoint {runs / 'step=2'}: {reason}"
    assert caplog.messages == [f"{passed_over}; took {runs / 'step=1'} instead", passed_over]
    assert none.out == "" and f"1 do not verify, such as step=2: {reason}" in none.err


@needs_users
def test_ls_says_why_a_file_cannot_be_read(
    directories: Path, anyones_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = anyones_path / "runs"
    shutil.copytree(directories / "step=1", runs / "step=1")
    Checkpointer(strategy="sync").save({"step": 3, "weight": torch.ones(1)}, runs / "c.ckpt")
    with closed_to_this_user(runs / "c.ckpt"):
        assert main(["ls", "--json", str(runs)]) == 1
    captured = capsys.readouterr()
    states = {entry["path"]: entry["state"] for entry in json.loads(captured.out)}
    assert states == {str(runs / "c.ckpt"): "error", str(runs / "step=1"): "committed"}
    assert (
        "cannot read the checkpoint: Permission denied" in captured.err and f"  file: {runs / 'c.ckpt'}" in captured.err
    )


@needs_users
def test_cp_and_mv_take_what_lies_beside_what_they_may_not_read(
    runs: Path, anyones_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = anyones_path / "there"
    Checkpointer(strategy="sync").save({"step": 0, "weight": torch.ones(1)}, runs / "c.ckpt")
    for path in (runs, runs / "step=1"):
        path.chmod(0o777)
    for verb in ("cp", "mv"):
        # The oldest checkpoint goes first: an error of it or of the closed directory does not stop the others.
        with closed_to_this_user(runs / "step=2", runs / "c.ckpt"):
            capsys.readouterr()
            assert main([verb, "--json", str(runs), str(there / verb)]) == 1
            captured = capsys.readouterr()
        assert [entry["target"] for entry in json.loads(captured.out)] == [str(there / verb / "step=1")]
        for closed in ("step=2", "c.ckpt"):
            assert captured.err.count(f"  file: {runs / closed}\n") == 1
        assert main(["verify", str(there / verb)]) == 0
    assert sorted(os.listdir(runs)) == ["c.ckpt", "step=2"], "only what has arrived was deleted"


@needs_users
def test_mv_copies_nothing_that_it_may_not_delete(
    directories: Path, anyones_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, there = anyones_path / "runs", anyones_path / "there"
    shutil.copytree(directories / "step=1", runs / "step=1")
    there.mkdir(mode=0o777)
    there.chmod(0o777)
    for kept, mode in ((runs, 0o555), (runs / "step=1", 0o755)):
        with closed_to_this_user(kept, mode=mode):
            assert main(["mv", str(runs / "step=1"), f"{there}/"]) == 1
        said = capsys.readouterr().err
        assert f"it cannot be moved: no permission to delete in {kept}\n" in said and "ckpt cp copies it" in said
        assert os.listdir(there) == []
        runs.chmod(0o777)
    assert main(["verify", str(runs / "step=1")]) == 0


def test_nothing_is_written_over_what_is_no_checkpoint(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(directory / "a.ckpt")
    before = sorted(directory.iterdir())
    assert main(["convert", source, str(directory), "--to", "directory"]) == 1
    assert "choose a name inside it" in capsys.readouterr().err
    assert main(["sync", str(directory), str(directory / "below"), "-r"]) == 1
    assert "copied into itself" in capsys.readouterr().err
    pipe = tmp_path.parent / f"{tmp_path.name}.pipe"
    os.mkfifo(pipe)
    assert main(["convert", source, str(pipe), "--to", "file"]) == 1
    assert pipe.is_fifo()
    assert "is not a regular file" in capsys.readouterr().err
    assert sorted(directory.iterdir()) == before


def test_diff_compares_what_other_programs_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"w": torch.ones(2)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(state, tmp_path / "same.ckpt")
        checkpointer.save({**state, "step": 4}, tmp_path / "other.ckpt")
    assert main(["diff", str(tmp_path / "dcp"), str(tmp_path / "same.ckpt")]) == 0
    assert main(["diff", str(tmp_path / "dcp"), str(tmp_path / "other.ckpt")]) == 1
    assert "3 and 4" in capsys.readouterr().out
    assert main(["diff", str(tmp_path), str(tmp_path / "dcp")]) == 2


@pytest.mark.parametrize(("monitor", "why"), [("loss", ["newest", "best"]), (None, ["newest"])])
def test_ls_calls_one_the_best_only_where_its_run_compared_something(
    monitor: str | None, why: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = {f"ModelCheckpoint{{'monitor': {monitor!r}, 'mode': 'min'}}": {"best_model_path": "run/a.ckpt"}}
    Checkpointer(strategy="sync").save({"callbacks": states}, tmp_path / "a.ckpt")
    assert main(["ls", str(tmp_path), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["kept_because"] == why
