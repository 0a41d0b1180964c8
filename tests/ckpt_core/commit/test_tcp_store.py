"""The store of the ranks: who can reach it, and what a stranger who reaches it can do."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from ckpt_core._commit import announcement as announcement_module
from ckpt_core._commit import tcp_store as store_module
from ckpt_core._commit.background_failures import RunOutcome
from ckpt_core._commit.rank_group import RankGroup
from ckpt_core._commit.save_outcome import JointSave, SaveSeries
from ckpt_core.errors import CheckpointError, RankFailedError
from tests.conftest import ScriptRunner

# Each rank connects, rank 0 returns where its store listens, and all count that they were there.
SCRIPT = """
import json, os, sys
sys.path.insert(0, os.getcwd())
from tests.support.ranks import Ranks
from tests.ckpt_core.commit.test_tcp_store import listening

def work(rank, group):
    found = listening(group.store.port) if rank == 0 else []
    group.store.add("there", 1)
    while group.store.add("there", 0) < 2:
        pass
    group.store.add("done", 1)
    while rank == 0 and group.store.add("done", 0) < 2:
        pass
    return found

print(json.dumps(Ranks(2, work).result(0)))
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
EVERYWHERE = {"00000000", "0" * 32}


def listening(port: int) -> list[str]:
    """Return the addresses, in hexadecimal as Linux writes them, at which this machine listens on a port."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if int(number, 16) == port and line.split()[3] == "0A":
                found.append(address)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, LOOPBACK),
        ({"MASTER_ADDR": "localhost"}, LOOPBACK),
        ({"MASTER_ADDR": "::1"}, LOOPBACK),
        ({"MASTER_ADDR": os.uname().nodename, "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, LOOPBACK),
        ({"MASTER_ADDR": os.uname().nodename, "SLURM_NNODES": "1", "SLURM_NTASKS": "2"}, LOOPBACK),
        ({"MASTER_ADDR": os.uname().nodename, "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}, EVERYWHERE),
    ],
)
def test_who_can_reach_the_store(
    environment: dict[str, str], expected: set[str], fork_script: ScriptRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_NNODES", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    found = json.loads(fork_script(SCRIPT, env=environment).stdout)
    assert found
    assert set(found) <= expected


@pytest.fixture
def ranks() -> list[RankGroup]:
    """Two ranks, in one process, as connect() connects them."""
    sent: list[object] = []

    def broadcast(value: object) -> object:
        sent.append(value)
        return value

    first = RankGroup.connect(0, 2, broadcast)
    return [first, RankGroup.connect(1, 2, lambda _: sent.pop(0))]


class Recording:
    """A stranger's own store, which records what a rank writes."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def set(self, key: str, value: str) -> None:
        self.written[key] = value
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def stranger_at(group: RankGroup) -> TCPStore:
    assert isinstance(group.store, TCPStore)
    return TCPStore(group.store.host, group.store.port, is_master=False, timeout=datetime.timedelta(seconds=60))


def test_a_report_that_no_rank_has_written_commits_nothing(
    ranks: list[RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger who lists the keys, and knows all formats, reports for rank 1."""
    monkeypatch.setattr(announcement_module, "_LINGER", 0.0)
    save: JointSave = JointSave(SaveSeries(ranks[0]), "a.ckpt", timeout=60)
    recording: Any = Recording()
    genuine = JointSave(SaveSeries(RankGroup(1, 2, recording, ranks[0].session)), "a.ckpt", timeout=0.01)
    assert genuine._store is not None
    genuine._store._answer_within = 60.0  # on a busy machine, a thread needs more than 0.01 s to ask
    genuine.join()
    with pytest.raises(RankFailedError):
        genuine.conclude("the report of rank 1", lambda _: 0)
    assert any("report/1" in key for key in recording.written)
    stranger = stranger_at(ranks[0])
    for key, value in recording.written.items():
        stranger.set(key, value)
    committed: list[Sequence[str]] = []

    def commit(reports: Sequence[str]) -> int:
        committed.append(reports)
        return 1

    save.join()
    with pytest.raises(RankFailedError, match="not written by one of the ranks"):
        save.conclude("the report of rank 0", commit)
    assert committed == []


def test_a_failure_that_no_rank_has_announced_is_none(ranks: list[RankGroup]) -> None:
    class Failed:
        is_busy = False
        failure: CheckpointError | None = None

        def take_failure(self) -> CheckpointError | None:
            return None

        def drain(self) -> None:
            pass

    saves, lie = Failed(), Failed()
    lie.failure = CheckpointError("a lie")
    recording: Any = Recording()
    second, liar = RunOutcome(saves, ranks[1].store, 1, 2), RunOutcome(lie, recording, 0, 2)
    for outcome in (second, liar):
        outcome.save_begun()
    liar.at_boundary()
    ((key, text),) = recording.written.items()
    stranger_at(ranks[0]).set(key, text)
    with pytest.raises(RankFailedError, match="not written by one of the ranks"):
        second.at_boundary()


def test_what_ranks_say_arrives(ranks: list[RankGroup]) -> None:
    lines = [store_module.TimedStore(group.store, answer_within=60) for group in ranks if group.store is not None]
    lines[0].set("key", "äöü and more")
    assert lines[1].get("key") == "äöü and more"
