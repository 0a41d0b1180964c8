"""Odd arguments of the command get an exit code and a line of text, and no checkpoint is lost.

Paths that are no checkpoint, or are spelled oddly, are given to the verbs, as sources and as targets.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import Checkpointer, DirectoryCheckpointer, EventLog, Kind, Part, StorageError
from ckpt_core.cli import main
from ckpt_core.cli.finding import refuse_inside_checkpoint, refuse_target_inside_checkpoint
from tests.support.closing import closed_to_this_user
from tests.support.damage import flip_bit

Capture = pytest.CaptureFixture[str]

# What is at a path, or how it is spelled, and the exit codes of verbs: those that read a checkpoint, list what is in a
# directory, or look for what to resume from (inspect, ls, latest), and those that write a file or a directory there.
ODD = {
    "nowhere": "1 1 3 0 0",
    "empty": "1 0 3 1 0",
    "empty.ckpt": "1 0 1 0 0",
    "truncated.ckpt": "1 0 1 1 1",
    "truncated": "0 0 1 1 1",
    "unfinished": "1 0 3 1 1",
    "saving": "1 0 3",
    "text.txt": "1 0 1 1 1",
    "pipe": "1 1 1 1 1",
    "dangling": "1 1 1 0 0",
    "loop": "1 1 1 1 1",
    "link.ckpt": "0 0 1 1 1",
    "link": "1 0 0 1 1",
    "b\udcffd": "1 0 0",
    "b\udcffd/\udcff.ckpt": "0 0 1 1 1",
    "new\nline/\x1b[31m.ckpt": "0 0 1 1 1",
    "-dash": "1 0 0 1 1",
    "é ü/é.ckpt": "0 0 1",
    ".": "1 0 0 1 1",
    "run//a.ckpt/": "0 0 1",
    "run/a.ckpt/below": "1 1 1 1 1",
    "file://{home}/run": "1 0 0 1 1",
    "~/run": "1 1 3",
    "x" * 300: "1 1 1 1 1",
    "nostore://bucket/run": "1 1 1 1 1",
    "": "2 2 2 2 2",
    "file://": "2 2 2 2 2",
}
READING = ("inspect", "ls", "latest", "du", "verify", "report", "prune --keep latest=9 --yes", "clean --dry-run")
READING += ("keep", "drop", "diff run/b.ckpt", "convert --to file", "import --format safetensors", "cp", "sync", "mv")
INTO_NEW = READING[-5:]
WRITING = ("convert run/b.ckpt --to file", "convert run/b.ckpt --to directory", "export run/c --format dcp")
WRITING += ("report events.jsonl -o", "cp run/a.ckpt", "cp run", "mv run/c", "mv run/a.ckpt", "sync run --delete --yes")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("odd")
    with Checkpointer(strategy="sync", listeners=[EventLog(home / "events.jsonl")]) as files:
        files.save({"w": torch.ones(3), "step": 1}, home / "run" / "a.ckpt")
        files.save({"w": torch.zeros(3), "step": 2}, home / "run" / "b.ckpt")
        for number, name in enumerate(("b\udcffd/\udcff", "new\nline/\x1b[31m", "-dash/-", "é ü/é")):
            files.save({"w": torch.full((3,), number + 2.0), "step": 3}, home / f"{name}.ckpt")
    with DirectoryCheckpointer(strategy="sync") as directories:
        for number, name in enumerate(("run/c", "truncated", "unfinished")):
            directories.save([Part("model", {"w": torch.full((3,), -1.0 - number)}, Kind.REPLICATED)], home / name)
    dcp.save({"model": {"w": torch.ones(300)}}, checkpoint_id=home / "dcp", no_dist=True)
    (home / "unfinished" / "manifest.json").unlink()
    shutil.copy(home / "run" / "a.ckpt", home / "truncated.ckpt")
    for cut in (home / "truncated" / "model.safetensors", home / "truncated.ckpt"):
        cut.write_bytes(cut.read_bytes()[:-4])
    for name in ("empty", "saving"):
        (home / name).mkdir()
    (home / "saving" / ".a.ckpt.0123456789ab.ckpt-part").write_bytes(b"half")
    (home / "empty.ckpt").write_bytes(b"")
    (home / "text.txt").write_text("nothing that torch reads")
    for name, to in {"dangling": "gone", "loop": "loop", "link.ckpt": "run/a.ckpt", "link": "run"}.items():
        (home / name).symlink_to(to)
    return home


@pytest.fixture
def home(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    fill(prepared, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    with (tmp_path / "home" / "saving" / ".a.ckpt.0123456789ab.ckpt-part").open("rb") as being_written:
        fcntl.flock(being_written, fcntl.LOCK_EX)
        yield tmp_path / "home"


def fill(prepared: Path, home: Path) -> None:
    shutil.copytree(prepared, home, symlinks=True)
    os.mkfifo(home / "pipe")


def contents(home: Path) -> dict[str, str]:
    """Return what each path is: the digest of a file's bytes, the target of a link, or another type."""
    found = {}
    for folder, folders, files in os.walk(home):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                found[path] = f"link to {os.readlink(path)}"
            elif os.path.isfile(path):
                found[path] = f"file {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
            else:
                found[path] = "directory" if os.path.isdir(path) else "special"
    return found


def files_of(found: dict[str, str], home: Path, directory: str = "") -> set[str]:
    below = os.path.join(home, directory)
    return {what for path, what in found.items() if what.startswith("file ") and path.startswith(below)}


def ran(words: list[str], capfd: Capture) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def check_words(command: list[str], code: int, error: str) -> None:
    """Check that a failure is one line that begins with the command, and that no output controls the terminal."""
    said = [line for line in error.splitlines() if line.startswith("ckpt")]
    assert "Traceback" not in error and "\x1b" not in error and len(error.splitlines()) <= 12
    takes_several = command[0] in ("verify", "sync") or (command[0] in ("cp", "mv") and os.path.isdir(command[-2]))
    assert not code or len(said) == 1 or takes_several or (command[0], code) == ("diff", 1), command


def name_of(odd: str) -> str:
    return ascii(odd)[1:-1][:20]


@pytest.mark.sampled(9)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("odd", ODD, ids=name_of)
def test_what_is_odd_to_read_is_told_and_nothing_is_changed(odd: str, home: Path, capfd: Capture) -> None:
    expected = dict(zip(READING, ODD[odd].split()[:3], strict=False))
    before = contents(home)
    for words in READING:
        if (words, odd) == ("report", "pipe"):
            continue  # the pipe is read once some process writes
        command = [*words.split(), "--json", "--", odd.format(home=home), *(["new"] if words in INTO_NEW else [])]
        code, out, error = ran(command, capfd)
        assert str(code) == expected.get(words, str(code)) and code in (0, 1, 2, 3, 4), (command, error)
        assert code != 3 or words in ("latest", "verify", "report")
        assert not out or json.loads(out) is not None
        check_words(command, code, error)
        after = contents(home)
        assert files_of(after, home) >= files_of(before, home), command
        assert words == "mv" or before.items() <= after.items(), command
        for path in after.keys() - before.keys():
            if after[path] == "directory":
                shutil.rmtree(path, ignore_errors=True)
            else:
                Path(path).unlink(missing_ok=True)


@pytest.mark.sampled(7)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("odd", [odd for odd, codes in ODD.items() if len(codes.split()) > 3], ids=name_of)
def test_what_is_odd_to_write_is_told_and_nothing_is_lost(odd: str, home: Path, prepared: Path, capfd: Capture) -> None:
    expected = dict(zip(WRITING, ODD[odd].split()[3:], strict=False))
    before = contents(home)
    for words in WRITING:
        if (words, odd) == ("report events.jsonl -o", "pipe"):
            continue  # the pipe is written once some process reads
        target = odd.format(home=home)
        command = [*words.split(), *(["--"] if target == "-dash" and "-o" not in words else []), target]
        code, _, error = ran(command, capfd)
        assert str(code) == expected.get(words, str(code)) and code in (0, 1, 2), (command, error)
        check_words(command, code, error)
        after = contents(home)
        if after == before:
            continue
        assert code == 0 or words.startswith("sync"), (command, error)
        assert files_of(after, home) >= files_of(before, home, "run"), command
        assert after[str(home / "pipe")] == "special"
        assert after[str(home / "text.txt")] == before[str(home / "text.txt")]
        os.chdir(home.parent)
        shutil.rmtree(home)
        fill(prepared, home)
        os.chdir(home)


@pytest.mark.parametrize("save", ["file", "directory", "copy"])
def test_no_save_replaces_a_pipe(save: str, home: Path) -> None:
    files, directories = Checkpointer(strategy="sync"), DirectoryCheckpointer(strategy="sync")
    with pytest.raises(StorageError, match="is not a regular file, so it is not replaced"):
        if save == "file":
            files.save({"step": 1}, home / "pipe")
        elif save == "directory":
            directories.save([Part("model", {"w": torch.ones(3)}, Kind.REPLICATED)], home / "pipe")
        else:
            files.copy(home / "run" / "a.ckpt", home / "pipe")
            files.wait()
    assert (home / "pipe").is_fifo()


def test_a_copy_that_is_damaged_is_replaced_when_it_is_told(home: Path, capfd: Capture) -> None:
    assert main(["cp", "run", "new"]) == 0
    for words in ("cp run/a.ckpt new --force", "sync run new --verify"):
        flip_bit(Path("new/a.ckpt"), 100)
        assert main(["cp", "run/a.ckpt", "new"]) == 1
        assert "--force replaces it" in capfd.readouterr().err
        assert main(words.split()) == 0
        assert main(["verify", "new"]) == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("convert run/a.ckpt run/b.ckpt --to file", "run/b.ckpt"),
        ("convert run/a.ckpt truncated.ckpt --to file", "truncated.ckpt"),
        ("convert run/a.ckpt run/c --to directory", "run/c"),
        ("convert run/c run/b.ckpt --to directory", "run/b.ckpt"),
        ("convert dcp run/b.ckpt --to directory", "run/b.ckpt"),
        ("import dcp run/c --format dcp", "run/c"),
    ],
)
def test_another_checkpoint_is_replaced_when_it_is_told(words: str, target: str, home: Path, capfd: Capture) -> None:
    before = contents(home)
    assert main(words.split()) == 1
    assert "there is another checkpoint at the target" in capfd.readouterr().err
    assert contents(home) == before
    assert main([*words.split(), "--force"]) == 0
    after, source = contents(home), words.split()[1]
    assert main(["verify", target]) == 0 and after != before
    assert files_of(after, home, source) == files_of(before, home, source)


def test_no_checkpoint_is_converted_into_itself(home: Path, capfd: Capture) -> None:
    before = contents(home)
    for words in (
        "run/c run/c --to directory",
        "run/c ./run/../run/c/ --to directory",
        "run/a.ckpt link.ckpt --to file",
    ):
        assert main(["convert", *words.split(), "--force"]) == 1
        assert "source and target are the same" in capfd.readouterr().err
    assert contents(home) == before


@pytest.mark.parametrize(
    "words",
    [
        "mv run run/c",  # c would be moved into itself and deleted, and all others with it
        "mv run run/c/new",
        "mv run link/c",
        "mv run/a.ckpt run/b.ckpt run/c",  # as from run/*, with the target forgotten
        "mv run/a.ckpt run/c/",
        "cp run/a.ckpt run/c/a.ckpt --force",
        "sync run run/c",
        "sync run run/c/new --delete --yes",
        "convert run/a.ckpt run/c/new --to file --force",
        "convert run/a.ckpt run/c/new/a --to directory",
        "convert run/a.ckpt run/c/new --to dcp",
        "export run/c link/c/model --format safetensors",
        "import dcp run/c/new --format dcp",
    ],
)
def test_nothing_is_written_into_a_checkpoint(words: str, home: Path, capfd: Capture) -> None:
    before = contents(home)
    assert main(words.split()) == 1
    assert "the target is inside a checkpoint" in capfd.readouterr().err
    assert contents(home) == before


def test_sync_copies_nothing_into_a_checkpoint_below_its_target(home: Path, capfd: Capture) -> None:
    for name in ("1.ckpt", "2.ckpt"):
        (home / "other" / "c").mkdir(parents=True, exist_ok=True)
        shutil.copy(home / "run" / "a.ckpt", home / "other" / "c" / name)
    before = contents(home)
    assert main(["sync", "-R", "other", "run", "--delete", "--yes"]) == 1
    assert "the target is inside a checkpoint" in capfd.readouterr().err
    assert contents(home) == before


def test_what_is_no_checkpoint_is_nothing_to_be_inside_of(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(home / "manifest.json")
    assert main(["cp", "run/a.ckpt", "empty"]) == 0
    (home / "manifest.json").unlink()
    (home / "manifest.json").mkdir()
    assert main(["convert", "run/a.ckpt", "new.ckpt", "--to", "file"]) == 0
    monkeypatch.chdir(home / "run" / "c")
    refuse_inside_checkpoint("/", None)
    refuse_target_inside_checkpoint("s3://bucket", None)


INTO_ANOTHER = (
    "cp run/a.ckpt run/c/",
    "mv run/a.ckpt run/c/",
    "sync other run/c",
    "convert run/a.ckpt run/c/n --to file",
)


@pytest.mark.parametrize("words", INTO_ANOTHER)
def test_nothing_is_written_into_a_checkpoint_of_a_newer_version(words: str, home: Path, capfd: Capture) -> None:
    (home / "other").mkdir()
    shutil.copy(home / "run" / "b.ckpt", home / "other" / "b.ckpt")
    manifest = home / "run" / "c" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":3', b'"version":4', 1))
    before = contents(home)
    assert main(words.split()) == 1
    assert "the target is inside a checkpoint" in capfd.readouterr().err
    assert contents(home) == before


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
@pytest.mark.parametrize("words", INTO_ANOTHER)
def test_nothing_is_written_into_a_checkpoint_whose_manifest_may_not_be_read(
    words: str, prepared: Path, anyones_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run", "other"):
        shutil.copytree(prepared / "run", anyones_path / name)
    for path in (anyones_path / "run", anyones_path / "run" / "c"):
        path.chmod(0o777)
    monkeypatch.chdir(anyones_path)
    before = contents(anyones_path)
    assert main(["verify", "run"]) == 0  # also imports what that user may not read
    with closed_to_this_user(anyones_path / "run" / "c" / "manifest.json"):
        assert main(words.split()) == 1
    said = capfd.readouterr().err
    assert "Permission denied" in said and f"  file: {anyones_path / 'run' / 'c' / 'manifest.json'}\n" in said
    assert "what to do: " in said and contents(anyones_path) == before


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
def test_a_manifest_above_that_may_not_be_read_keeps_nobody_from_copying(prepared: Path, anyones_path: Path) -> None:
    shutil.copytree(prepared / "run", anyones_path / "run")
    manifest, target = anyones_path / "manifest.json", anyones_path / "new"
    manifest.write_text("{}")
    target.mkdir()
    target.chmod(0o777)
    with closed_to_this_user(manifest):
        assert main(["cp", str(anyones_path / "run" / "a.ckpt"), f"{target}/"]) == 0
    assert (target / "a.ckpt").exists()


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_a_checkpoint_is_found_from_inside(verb: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "run" / "c")
    assert main([verb, "."]) == 0


@pytest.mark.parametrize("words", ["mv run/a.ckpt other/a.ckpt empty -f", "cp run other empty"])
def test_of_equal_names_none_replaces_the_other(words: str, home: Path, capfd: Capture) -> None:
    (home / "other").mkdir()
    shutil.copy(home / "run" / "b.ckpt", home / "other" / "a.ckpt")
    before = contents(home)
    assert main(words.split()) == 1
    assert "other/a.ckpt has the same name" in capfd.readouterr().err
    assert contents(home) == before


def test_one_checkpoint_by_two_names_is_copied_once(home: Path, capfd: Capture) -> None:
    (home / "other").mkdir()
    shutil.copy(home / "run" / "a.ckpt", home / "other" / "a.ckpt")
    for words in ("cp run/a.ckpt other/a.ckpt empty", "cp run/b.ckpt link/b.ckpt empty"):
        assert main(words.split()) == 0
    assert sorted(path.name for path in (home / "empty").iterdir()) == ["a.ckpt", "b.ckpt"]


def test_other_files_of_the_name_of_a_manifest_are_nobodys_checkpoint(home: Path, capfd: Capture) -> None:
    (home / "manifest.json").write_text('{"files": []}')
    assert main(["cp", "run/a.ckpt", "empty"]) == 0
    assert (home / "empty" / "a.ckpt").exists()


def test_nothing_of_a_store_is_moved_into_a_checkpoint(home: Path, capfd: Capture) -> None:
    bucket = f"memory://{home.name}"
    assert main(["cp", "run", f"{bucket}/run"]) == 0
    before = sorted(fsspec.filesystem("memory").find(bucket))
    assert main(["mv", f"{bucket}/run", f"{bucket}/run/c/new"]) == 1
    assert "the target is inside a checkpoint" in capfd.readouterr().err
    assert sorted(fsspec.filesystem("memory").find(bucket)) == before


def test_nothing_is_written_where_a_store_refuses_the_manifest(
    home: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, bucket = fsspec.filesystem("memory"), f"/{home.parent.name}"
    assert main(["cp", "run", f"memory:/{bucket}/run"]) == 0
    before = sorted(store.find(bucket))
    info = type(store).info

    def refuse(self: object, path: str, **options: object) -> object:
        # Credentials for one prefix get this answer above it, where, as far as is known, there is no checkpoint.
        if path.endswith(("/run/c/manifest.json", f"{bucket}/manifest.json")):
            raise PermissionError("Forbidden")
        return info(self, path, **options)

    monkeypatch.setattr(type(store), "info", refuse)
    assert main(["cp", "run/a.ckpt", f"memory:/{bucket}/run/c/"]) == 1
    said = capfd.readouterr().err
    assert "Forbidden" in said and f"  file: memory:/{bucket}/run/c/manifest.json\n" in said
    assert sorted(store.find(bucket)) == before
    assert main(["cp", "run/a.ckpt", f"memory:/{bucket}/run/new/"]) == 0


def test_links_are_moved_before_what_they_lead_to(home: Path, capfd: Capture) -> None:
    for name, to in {"last.ckpt": "b.ckpt", "last": "c"}.items():
        (home / "run" / name).symlink_to(to)
    assert main(["mv", "run", "new"]) == 0
    assert "deleted meanwhile" not in capfd.readouterr().err
    assert sorted(os.listdir("new")) == ["a.ckpt", "b.ckpt", "c", "last", "last.ckpt"]
    assert not os.listdir("run")
    assert main(["verify", "new"]) == 0


@pytest.mark.parametrize("words", ["convert module.pt new --to file", "diff module.pt module.pt"])
def test_what_may_run_code_names_the_option_that_allows_it(words: str, home: Path, capfd: Capture) -> None:
    torch.save(torch.nn.Linear(2, 2), home / "module.pt")
    assert main(words.split()) in (1, 2)
    assert "take --allow-pickle" in capfd.readouterr().err
    assert main([*words.split(), "--allow-pickle"]) == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    "words",
    [
        "export large new --format dcp",
        "export large new --format safetensors",
        "convert large new --to accelerate",
        "report events.jsonl -o new",
    ],
)
def test_a_full_disk_is_told_by_the_name_of_the_file(words: str, home: Path, capfd: Capture) -> None:
    large = Part("model", {"w": torch.ones(10_000)}, Kind.REPLICATED)
    DirectoryCheckpointer(strategy="sync").save([large], home / "large")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if "dcp" in words else 2000, limits[1]))
        code, _, error = ran(words.split(), capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and ("File too large" in error or "could not be written" in error) and "Traceback" not in error
    assert "new" in error and not (home / "new").is_dir()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "--size", "0"], "is not a number of megabytes"),
        (["doctor", "text.txt"], "there is no such directory"),
        (["doctor", "pipe"], "there is no such directory"),
        (["doctor", "--like", "pipe"], "there is no such file"),
        (["ls", "--recusive"], "did you mean --recursive?"),
        (["doctor", "--gpu"], "[PATH]\nckpt doctor: unrecognized arguments: --gpu\n"),
        (["convert", "run/a.ckpt", "new", "--to", "fiel"], "'accelerate'): did you mean file?"),
        (["rehearse", "--"], "give the command"),
        (["rehearse", "--", "no-such-program"], "no-such-program"),
        (["prune", "run"], "say what to keep"),
        (["prune", "run", "--keep", "latest=1"], "--yes deletes"),
        (["clean"], "name a directory"),
    ],
)
def test_what_makes_no_sense_is_told(words: list[str], said: str, capfd: Capture) -> None:
    code, _, error = ran(words, capfd)
    assert code in (1, 2, 3) and said in error and "Traceback" not in error


# ---- what only a separate process has --------------------------------------------------------------------------------

LATEST = "import sys; from ckpt_core.cli import main; [main(['latest', directory]) for directory in sys.argv[1:]]"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("no_color", "term"), [("", "xterm"), ("1", "xterm"), ("", "dumb")])
def test_a_terminal_has_colours_unless_they_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch, no_color: str, term: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    terminal, other_end = os.openpty()
    with open(other_end, "w") as output, contextlib.redirect_stdout(output):
        assert main(["verify", "run/a.ckpt"]) == 0
    shown = os.read(terminal, 1000)
    os.close(terminal)
    assert b"whole" in shown and (b"\x1b[32m" in shown) == ((no_color, term) == ("", "xterm"))


@pytest.mark.extended
@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_latest_prints_the_bytes_of_a_name_whatever_the_encoding(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    command = [sys.executable, "-c", LATEST, "b\udcffd", "é ü"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert [os.path.isfile(name) for name in done.stdout.splitlines()] == [True] * 2, done


INTERRUPTED = """
import sys, signal

module, sys.argv[1:] = sys.argv[1], ["verify", "run"]

class CtrlC:
    def find_spec(self, name, *_):
        if name == module:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
from ckpt_core.cli import main
"""


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("module", ["ckpt_core.cli.parser", "argparse", "ckpt_core.cli.doctor", "torch"])
def test_ctrl_c_during_the_imports_is_no_traceback(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{INTERRUPTED}sys.exit(main(sys.argv[1:]))", module],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ckpt: interrupted\n")


@pytest.mark.usefixtures("home")
def test_ctrl_c_once_more_is_no_traceback() -> None:
    code = f"{INTERRUPTED}main()\nsignal.raise_signal(signal.SIGINT)"
    done = subprocess.run(
        [sys.executable, "-c", code, "torch"], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "ckpt: interrupted\n")
