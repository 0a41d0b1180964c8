"""Collectives for ranks whose tensors are on the simulated device: by gloo, through copies on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

BACKEND = "through_host"


def register() -> None:
    """Register the backend with torch, for ``init_process_group(BACKEND)``."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _Group, devices=["cpu", "simulated"])


class _Group(dist.ProcessGroup):
    """A process group of gloo that copies a device's tensors to the host and back, blocking."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _do(self, call: Callable[..., Any], written: Sequence[torch.Tensor], *arguments: Any) -> Any:
        hosts: dict[int, torch.Tensor] = {}

        def on_host(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return hosts.setdefault(id(value), value.detach().cpu())
            if isinstance(value, (list, tuple)):
                return [on_host(item) for item in value]
            return value

        call(*map(on_host, arguments)).wait()
        for tensor in written:
            if not tensor.is_cpu:
                tensor.detach().copy_(hosts[id(tensor)])
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(written))
        return _create_work_from_future(future)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return self._do(self._gloo.allreduce, tensors, tensors, options or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, options: Any = None) -> Any:
        plain = dist.AllreduceOptions()
        plain.reduceOp = options.reduceOp if options is not None else dist.ReduceOp.SUM
        for tensor in tensors:
            work = self.allreduce([tensor], plain)
        return work

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return self._do(self._gloo.broadcast, tensors, tensors, options or dist.BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        flat = [tensor for row in outputs for tensor in row]
        return self._do(self._gloo.allgather, flat, outputs, inputs)

    def _allgather_base(self, output: Any, given: Any, options: Any = None) -> Any:
        rows = list(output.view(-1).chunk(self.size()))
        return self._do(self._gloo.allgather, rows, [rows], [given.reshape(-1)])

    def _reduce_scatter_base(self, output: Any, given: Any, options: Any = None) -> Any:
        whole = given.detach().cpu().clone()
        plain = dist.AllreduceOptions()
        op = options.reduceOp if options is not None else dist.ReduceOp.SUM
        plain.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        self._gloo.allreduce([whole], plain).wait()
        if op == dist.ReduceOp.AVG:
            whole /= self.size()
        output.copy_(whole.view(-1).chunk(self.size())[self.rank()].view(output.shape))
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([output])
        return _create_work_from_future(future)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # as torch 2.13 calls them

    def scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._do(self._gloo.scatter, outputs, outputs, inputs, options)

    def gather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        flat = [tensor for row in outputs for tensor in row]
        return self._do(self._gloo.gather, flat, outputs, inputs, options)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        return self._do(lambda t: self._gloo.send(t, rank, tag), [], tensors)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        return self._do(lambda t: self._gloo.recv(t, rank, tag), tensors, tensors)
