"""DiLoCo: workers train alone for some steps; then an outer optimizer steps shared parameters with their results."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ckpt_async.local_updates.worker_state import WorkerState
from ckpt_core.errors import StateMismatchError
from ckpt_core.state.kinds import Kind, Part, saved_buffers

logger = logging.getLogger(__name__)


class OuterLoop(abc.ABC):
    """The state of a DiLoCo implementation that a checkpoint needs; its methods are called at outer boundaries only."""

    @abc.abstractmethod
    def global_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that all workers share, by name."""

    @abc.abstractmethod
    def outer_state(self) -> dict[str, Any]:
        """Return all other state that is equal on all workers: outer optimizers, counts."""

    @abc.abstractmethod
    def own_parameters(self) -> dict[str, torch.Tensor]:
        """Return this worker's parameters that differ from the shared ones; none unless fragments sync separately."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return this worker's buffers (statistics of BatchNorm), by name; none if the model is not known here."""
        return {}

    @abc.abstractmethod
    def load(self, parameters: Mapping[str, torch.Tensor], outer: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Restore global parameters, outer state and own parameters, and set the model's parameters accordingly."""


class DiLoCo(OuterLoop):
    """A plain DiLoCo: call :meth:`sync` after each window of inner steps.

    The algorithm is that of Douillard et al. (2023): the average difference between the shared parameters and the
    workers' is the gradient of the outer optimizer. All workers must call :meth:`sync` the same number of times; also
    a worker without data.

    Args:
        model: This worker's model; equal on all workers at the start.
        outer: Optimizer of ``model.parameters()``; the paper's is ``SGD(lr=0.7, momentum=0.9, nesterov=True)``.
        group: Process group of the workers; all processes by default.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> loop = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True))
        >>> inner = torch.optim.AdamW(model.parameters())
        >>> for window in range(2):
        ...     for step in range(10):
        ...         inner.zero_grad()
        ...         model(torch.ones(4, 2)).pow(2).mean().backward()
        ...         inner.step()
        ...     loop.sync()
    """

    def __init__(
        self, model: torch.nn.Module, outer: torch.optim.Optimizer, *, group: dist.ProcessGroup | None = None
    ) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._outer = outer
        self._group = group
        self._shared = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._gradients: dict[str, torch.Tensor | None] = {}

    @torch.no_grad()
    def sync(self) -> None:
        """End a window: step the shared parameters, and begin the next window from them."""
        is_alone = not dist.is_initialized()
        workers = 1 if is_alone else dist.get_world_size(self._group)
        for name, parameter in self._parameters.items():
            gradient = (self._shared[name] - parameter) / workers
            if not is_alone:
                dist.all_reduce(gradient, group=self._group)
            parameter.copy_(self._shared[name])
            self._gradients[name], parameter.grad = parameter.grad, gradient
        self._outer.step()
        for name, parameter in self._parameters.items():
            # Put back the gradients of the inner steps, which belong to the inner optimizer.
            parameter.grad = self._gradients.pop(name)
            self._shared[name].copy_(parameter)

    def global_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._shared)

    def outer_state(self) -> dict[str, Any]:
        return {"optimizer": self._outer.state_dict()}

    def buffers(self) -> dict[str, torch.Tensor]:
        return saved_buffers(self._model)

    def own_parameters(self) -> dict[str, torch.Tensor]:
        parameters = {name: parameter.detach() for name, parameter in self._parameters.items()}
        return {name: value for name, value in parameters.items() if not torch.equal(value, self._shared[name])}

    @torch.no_grad()
    def load(self, parameters: Mapping[str, torch.Tensor], outer: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        for name, parameter in self._parameters.items():
            self._shared[name].copy_(parameters[name])
            parameter.copy_(own.get(name, parameters[name]))
        self._outer.load_state_dict(outer["optimizer"])


class DiLoCoState:
    """The state of a DiLoCo training, as parts of a directory checkpoint.

    Save it at an outer boundary, where all workers' models equal the shared parameters, so that another number of
    workers can resume from it. Each worker calls :meth:`parts` and :meth:`load`.

    Args:
        loop: :class:`DiLoCo`, or torchft's in a :class:`~ckpt_async.local_updates.TorchftLoop`.
        own: This worker's own state: its inner optimizer, its position in the data.
        buffers: Returns the buffers of this worker's model, as ``lambda: dict(model.named_buffers())``. None: those of
            the state dict of the model that :class:`DiLoCo` was given; none for torchft's, which has no model.

    Example::

        state = DiLoCoState(loop, WorkerState(cursor, inner=inner))
        with checkpointer.load(path) as opened:
            state.load(opened)
        for window in range(cursor.windows(20)):
            for update in cursor.take(20):
                train(model, inner, update)
            loop.sync()
            checkpointer.save(state.parts(), path)
    """

    def __init__(
        self, loop: OuterLoop, own: WorkerState, *, buffers: Callable[[], Mapping[str, torch.Tensor]] | None = None
    ) -> None:
        self._loop = loop
        self._own = own
        self._buffers = buffers or loop.buffers

    def parts(self) -> list[Part]:
        """Return the current state as parts: ``model`` and ``outer``, equal on all workers, and ``worker``."""
        buffers = dict(self._buffers())
        worker = {"state": self._own.state_dict(), "parameters": self._loop.own_parameters(), "buffers": buffers}
        return [
            Part("model", self._loop.global_parameters(), Kind.REPLICATED),
            Part("outer", self._loop.outer_state(), Kind.REPLICATED),
            Part("worker", worker, Kind.PER_RANK),
        ]

    def load(self, opened: Any) -> None:
        """Resume from a checkpoint of this or another number of workers.

        The shared parameters and the outer optimizer are restored bit for bit, and no batch is lost or used twice. With
        the same number of workers, each also gets its own state back bit for bit; for another number, see
        :meth:`~ckpt_async.local_updates.WorkerState.load_state_dicts`.

        Args:
            opened: The result of :meth:`ckpt_core.DirectoryCheckpointer.load`.

        Raises:
            StateMismatchError: It was saved by another number of workers, and not at an outer boundary of all
                parameters; or it is of another model.
        """
        cursor = self._own.cursor
        saved = opened.world_size
        own = cursor.worker % saved
        # A new worker derives its random generators from worker 0's. For other workers, the manifest's part is enough.
        read = {own} if own == cursor.worker else {own, 0}
        workers = [(opened.load if rank in read else opened.peek)("worker", rank=rank) for rank in range(saved)]
        if saved != cursor.workers and any(worker["parameters"] for worker in workers):
            raise StateMismatchError(
                f"{saved} workers had parameters of their own, and there are {cursor.workers} workers now",
                key="worker.parameters",
                remedy=f"resume with {saved} workers, or save right after sync(), with one fragment",
            )
        mine = workers[own]
        self._loop.load(opened.load("model"), opened.load("outer"), mine["parameters"])
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                if name in mine["buffers"]:
                    buffer.copy_(mine["buffers"][name])
                else:
                    logger.warning("%s has nothing of the buffer %s, which stays as it is", opened.path, name)
        self._own.load_state_dicts([worker["state"] for worker in workers])
