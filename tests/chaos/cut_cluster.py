"""Real processes of one training: started by fork, killed by SIGKILL."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ckpt_async.consistent_cut import COORDINATOR
from ckpt_async.parameter_server import SocketTransport, Transport
from tests.chaos.cut_network import ReorderingTransport
from tests.chaos.cut_training import Job, coordinate, make_optimizer, serve, work

Process = multiprocessing.context.ForkProcess
_FORK = multiprocessing.get_context("fork")
FINISHED = 0


class Cluster:
    """The processes of one start of a training.

    Args:
        job: The training.
        log: Directory for the log of each process.
        serve: What a shard does.
        work: What a worker does.
    """

    def __init__(
        self,
        job: Job,
        log: Path,
        *,
        serve: Callable[[Job, Transport, str], None] = serve,
        work: Callable[[Job, Transport, str], None] = work,
    ) -> None:
        self.job = job
        self.log = log
        self._serve, self._work = serve, work
        _import_what_torch_imports_late()
        log.mkdir(parents=True, exist_ok=True)
        receiver, sender = _FORK.Pipe(duplex=False)
        self.processes = {COORDINATOR: self._start(COORDINATOR, self._coordinate, sender)}
        sender.close()
        if not receiver.poll(60):
            self.kill()
            raise TimeoutError("the coordinator did not start")
        self.address: str = receiver.recv()
        for name in (*job.shard_names, *job.worker_names):
            self.start(name)

    def start(self, name: str) -> None:
        """Start a shard or a worker, also one that was killed."""
        role = self._serve if name.startswith("shard") else self._work
        self.processes[name] = self._start(name, self._take_part, name, role)

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> Process:
        process = _FORK.Process(target=_run, args=(self.log / f"{name}.log", target, *arguments), name=name)
        process.start()
        return process

    def _coordinate(self, sender: Connection) -> None:
        transport = self._transport(COORDINATOR)
        coordinator = coordinate(self.job, transport)
        sender.send(transport.address)
        coordinator.run()

    def _take_part(self, name: str, role: Callable[[Job, Transport, str], None]) -> None:
        role(self.job, self._transport(name), self.address)

    def _transport(self, name: str) -> Transport:
        transport = SocketTransport(name)
        return ReorderingTransport(transport, os.getpid()) if self.job.reorder else transport

    def wait(self, timeout: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the training has ended or ``until`` returns True; return whether it has ended well."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not until():
            if not any(process.is_alive() for process in self.processes.values()):
                return self.finished
            if self.processes[COORDINATOR].exitcode not in {None, FINISHED}:
                return False
            time.sleep(0.005)
        return self.finished

    @property
    def finished(self) -> bool:
        """Whether every process has ended well."""
        return all(process.exitcode == FINISHED for process in self.processes.values())

    @property
    def broken(self) -> bool:
        """Whether a process has ended badly, without having been killed."""
        return any(process.exitcode not in {None, FINISHED, -signal.SIGKILL} for process in self.processes.values())

    def kill(self, chance: random.Random | None = None) -> None:
        """SIGKILL everything, in any order."""
        processes = list(self.processes.values())
        (chance or random.Random()).shuffle(processes)
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()

    def logs(self) -> str:
        """Return the logs of all processes."""
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(self.log.glob("*.log")))


@functools.cache
def _import_what_torch_imports_late() -> None:
    """Take a first optimizer step, whose imports take seconds: once here, instead of in every process."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    make_optimizer([("first", parameter)]).step()


def _run(log: Path, target: Callable[..., None], *arguments: object) -> None:
    torch.set_num_threads(1)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file  # where a test runner has replaced them
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
        try:
            target(*arguments)
        except BaseException:  # noqa: BLE001 - the end of the process
            traceback.print_exc()
            file.flush()
            os._exit(1)
