"""The same training over ``torch.distributed.rpc``: unordered messages, real processes, killed and resumed."""

from __future__ import annotations

import dataclasses
import os
import socket
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from torch.distributed import rpc

from ckpt_async.consistent_cut import COORDINATOR
from ckpt_async.parameter_server import CutStore, Transport
from ckpt_async.parameter_server.torch_rpc import TorchRpcTransport
from tests.chaos.cut_campaign import wait_for_checkpoints
from tests.chaos.cut_cluster import Cluster
from tests.chaos.cut_training import Job, coordinate, violations

LIMIT = 120.0


@dataclasses.dataclass(frozen=True)
class RpcJob(Job):
    """A job whose processes meet at a port."""

    port: int = 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class RpcCluster(Cluster):
    """The processes of a training that talk by RPC."""

    job: RpcJob

    def _coordinate(self, sender: Connection) -> None:
        sender.send(COORDINATOR)
        self._with_rpc(COORDINATOR, lambda transport: coordinate(self.job, transport).run())

    def _take_part(self, name: str, role: Callable[[Job, Transport, str], None]) -> None:
        self._with_rpc(name, lambda transport: role(self.job, transport, COORDINATOR))

    def _with_rpc(self, name: str, action: Callable[[Transport], object]) -> None:
        warnings.simplefilter("ignore")
        os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
        names = [COORDINATOR, *self.job.shard_names, *self.job.worker_names]
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=8, rpc_timeout=60, init_method=f"tcp://127.0.0.1:{self.job.port}"
        )
        rpc.init_rpc(name, rank=names.index(name), world_size=len(names), rpc_backend_options=options)
        action(TorchRpcTransport(name))
        rpc.shutdown(graceful=False)


@pytest.mark.timeout(300)
def test_a_training_over_rpc_is_killed_and_resumed(tmp_path: Path) -> None:
    job = RpcJob(str(tmp_path / "checkpoints"), epochs=2, samples=480, every=0.2, keep=1000, port=free_port())
    store = CutStore(job.root)
    cluster = RpcCluster(job, tmp_path / "log")
    try:
        assert wait_for_checkpoints(store, 2, LIMIT), cluster.logs()
    finally:
        cluster.kill()
    second = RpcCluster(dataclasses.replace(job, port=free_port()), tmp_path / "log-2")
    try:
        assert second.wait(LIMIT), second.logs()
    finally:
        second.kill()
    for path in store.committed():
        with store.open(path) as checkpoint:
            assert violations(job, checkpoint) == []
    with store.open(store.committed()[0]) as last:
        assert dict(last.cut.vector) == dict.fromkeys(range(job.streams), job.batches)


@pytest.mark.timeout(120)
def test_a_lost_peer_is_noticed(tmp_path: Path) -> None:
    job = RpcJob(str(tmp_path / "checkpoints"), epochs=50, every=0.2, port=free_port())
    cluster = RpcCluster(job, tmp_path / "log")
    try:
        assert wait_for_checkpoints(CutStore(job.root), 1, LIMIT), cluster.logs()
        cluster.processes["shard-1"].kill()
        for process in cluster.processes.values():
            process.join(30)
        assert "shard-1" in (cluster.log / "coordinator.log").read_text()
        assert cluster.processes[COORDINATOR].exitcode == 1
    finally:
        cluster.kill()
