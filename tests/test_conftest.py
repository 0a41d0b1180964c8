"""The shared fixtures do what other tests rely on."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import CORE, ScriptRunner
from tests.support.fork_server import ForkServers
from tests.support.ports import free_port
from tests.support.script_server import ScriptServer

pytest_plugins = ["pytester"]


def test_a_small_filesystem_runs_full(small_filesystem: Path) -> None:
    assert os.stat(small_filesystem).st_dev != os.stat(small_filesystem.parent).st_dev
    assert list(small_filesystem.iterdir()) == []
    with pytest.raises(OSError, match="No space left") as caught, (small_filesystem / "file").open("wb") as file:
        for _ in range(9):
            file.write(bytes(2**20))
    assert caught.value.errno == errno.ENOSPC


@pytest.fixture(params=["run_script", "fork_script", "fork of a fork"])
def any_script(request: pytest.FixtureRequest) -> ScriptRunner:
    if request.param == "fork of a fork":
        return functools.partial(request.getfixturevalue("fork_script"), modules=("wave",))
    return request.getfixturevalue(request.param)


@pytest.mark.sampled(1)
def test_a_script_gets_its_arguments_and_environment(any_script: ScriptRunner, tmp_path: Path) -> None:
    done = any_script(
        """
        import os, sys, torch, ckpt_core
        print(sys.argv[1:], os.environ["NEW"], "HOME" in os.environ, torch.get_num_threads(), os.getcwd())
        print("problem", file=sys.stderr)
        """,
        "a b",
        1,
        env={"NEW": "yes", "HOME": None},
    )
    assert done.stdout == f"['a b', '1'] yes False 1 {tmp_path}\n"
    assert done.stderr == "problem\n"


def test_the_exit_status_of_a_script_is_checked_unless_told_otherwise(any_script: ScriptRunner) -> None:
    assert any_script("raise SystemExit(3)", check=False).returncode == 3
    assert any_script("raise KeyError('x')", check=False).stderr.endswith("KeyError: 'x'\n")
    assert any_script("import os; os.kill(os.getpid(), 9)", check=False).returncode == -9
    assert any_script("raise KeyboardInterrupt", check=False).returncode == -2
    with pytest.raises(pytest.fail.Exception, match=r"status 1\n[^$]*said this[^$]*because"):
        any_script("print('said this'); raise SystemExit('because')")


def test_a_script_ends_as_programs_do(any_script: ScriptRunner) -> None:
    done = any_script(
        """
        import atexit, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        """
    )
    assert done.stdout == "thread\nat exit\n"


def test_a_forked_script_finds_nothing_of_the_one_before(fork_script: ScriptRunner) -> None:
    code = "import os, sys, torch; print(hasattr(torch, 'of_mine'), os.environ.get('MINE'), 'x' in globals())"
    fork_script(code + "; torch.of_mine = 1; x = 1", env={"MINE": "1"})
    assert fork_script(code).stdout == "False None False\n"


def test_a_script_answers_until_it_is_closed_with_its_children(fork_servers: ForkServers, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import json, os, sys, time

child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(600)
for line in sys.stdin:
    print(json.dumps([json.loads(line), child, os.getcwd()]), flush=True)
"""
    )
    server = ScriptServer(fork_servers(CORE), script, tmp_path)
    (said, child, folder), again = (server.ask({"number": number}) for number in range(2))
    assert (said["number"], again[0]["number"], folder) == (0, 1, str(tmp_path))
    server.close()
    assert _is_gone(child)


def test_a_script_that_ends_without_an_answer_is_not_waited_for(fork_servers: ForkServers, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("input(); raise LookupError('no answer')")
    server = ScriptServer(fork_servers(CORE), script, tmp_path)
    with pytest.raises(json.JSONDecodeError):
        server.ask({})
    server.close()
    assert (tmp_path / "log").read_text().endswith("LookupError: no answer\n")


def test_a_script_that_dies_before_it_begins_is_not_waited_for(fork_servers: ForkServers, tmp_path: Path) -> None:
    started = fork_servers(CORE).start(tmp_path / "script.py", tmp_path / "no such folder" / "log", {})
    assert started.stdout.read() == ""
    with pytest.raises(BrokenPipeError):
        while True:  # until the server has closed its end of the pipe
            print("for nobody", file=started.stdin, flush=True)
            time.sleep(0.01)
    started.end()


@pytest.mark.sampled(1)
def test_a_script_that_hangs_is_killed_with_its_children(any_script: ScriptRunner, tmp_path: Path) -> None:
    child, seconds = tmp_path / "child", 3
    while not child.exists():  # a busy machine may take longer to begin
        with pytest.raises(pytest.fail.Exception, match=f"did not end within {seconds} s"):
            any_script(
                """
                import os, pathlib, subprocess, sys, time
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                pathlib.Path("part").write_text(str(child.pid))
                os.rename("part", "child")
                time.sleep(600)
                """,
                timeout=seconds,
            )
        seconds *= 2
    assert _is_gone(int(child.read_text()))


def _is_gone(pid: int) -> bool:
    """Whether the process ends within some minutes; a zombie that its new parent has not reaped yet counts as ended."""
    for _ in range(4000):
        status = Path(f"/proc/{pid}/status")
        try:
            if "State:\tZ" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_what_the_machine_lacks_is_a_skip_but_fails_in_ci(unavailable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no disk"):
        unavailable("no disk")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no disk"):
        unavailable("no disk")


def test_torch_runs_one_thread() -> None:
    assert torch.get_num_threads() == 1


@pytest.mark.threads(2)
def test_torch_runs_as_many_threads_as_the_marker_says() -> None:
    assert torch.get_num_threads() == 2


def test_a_thread_left_alive_fails_the_test_that_started_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(threading, "release_of_this_test", release, raising=False)
    leaks = """
        import threading

        def test_leaks():
            threading.Thread(target=threading.release_of_this_test.wait, name="ckpt-writer", daemon=True).start()
    """
    try:
        result = run_with_our_conftest(pytester, leaks, grace="0.5")
    finally:
        release.set()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*threads left alive after the test: ckpt-writer*"])
    for thread in threading.enumerate():
        if thread.name == "ckpt-writer":
            thread.join()


def test_a_thread_that_ends_after_the_test_is_waited_for(pytester: pytest.Pytester) -> None:
    ends = """
        import threading, time

        def test_leaves_nothing_of_ours_for_long():
            threading.Timer(0.1, int).start()
            threading.Thread(target=time.sleep, args=(0.1,), name="ckpt-writer").start()
    """
    run_with_our_conftest(pytester, ends, grace="60.0").assert_outcomes(passed=1)


def test_cells_are_extended_but_for_as_few_as_have_each_value_or_as_many_as_are_sampled(
    pytester: pytest.Pytester,
) -> None:
    matrices = """
        import pytest

        @pytest.mark.each_value
        @pytest.mark.parametrize("one", [True, False])
        @pytest.mark.parametrize("other", [3, pytest.param(4, marks=pytest.mark.slow), 5, 6])
        def test_matrix(one, other):
            pass

        @pytest.mark.sampled(2)
        @pytest.mark.parametrize("value", range(6))
        def test_list(value):
            pass

        @pytest.mark.sampled(2)
        @pytest.mark.parametrize("one", [True, False])
        @pytest.mark.parametrize("other", [3, 4])
        def test_small_matrix(one, other):
            pass

        @pytest.mark.extended_cells("x-1")
        @pytest.mark.parametrize(("name", "number"), [("x", 0), ("x", 1)])
        def test_named(name, number):
            pass
    """
    result = run_with_our_conftest(pytester, matrices, "-v", "-m", "not extended and not slow", grace="60.0")
    matrix = ("matrix[3-True]", "matrix[5-False]", "matrix[6-True]", "small_matrix[3-True]", "small_matrix[4-False]")
    for cell in (*matrix, "list[0]", "list[3]", "named[x-0]"):
        assert f"::test_{cell} PASSED" in result.stdout.str()
    result.assert_outcomes(passed=8, deselected=12)


def run_with_our_conftest(pytester: pytest.Pytester, tests: str, *options: str, grace: str) -> pytest.RunResult:
    source = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(source.replace("THREAD_GRACE_SECONDS = 60.0", f"THREAD_GRACE_SECONDS = {grace}"))
    names = ("threads(count)", "gpu", "each_value", "extended", "extended_cells(ids)", "sampled(count)", "slow")
    pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"    {name}: x\n" for name in names))
    pytester.makepyfile(tests)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


def test_a_script_leaves_no_descendants_in_other_sessions(any_script: ScriptRunner) -> None:
    done = any_script(
        """
        import subprocess, sys
        sleeper = "import time; print('up', flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True, stdout=-1, stderr=subprocess.DEVNULL)
        child.stdout.readline()
        print(child.pid)
        raise SystemExit(1)
        """,
        check=False,
    )
    status = Path(f"/proc/{int(done.stdout)}/stat")

    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while status.read_text().rpartition(")")[2].split()[0] != "Z":  # or a zombie, not reaped yet
            time.sleep(0.01)  # it was killed, but has not ended yet


def test_a_port_is_given_to_one_test_alone_until_its_server_listens() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    server = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    server.set("key", "value")
    assert torch.distributed.TCPStore("127.0.0.1", port, is_master=False).get("key") == b"value"
