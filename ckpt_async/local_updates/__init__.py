"""Training in which each worker runs its own optimizer steps: Hogwild and DiLoCo (``docs/async_training.md``)."""

from ckpt_async.local_updates.diloco import DiLoCo, DiLoCoState, OuterLoop
from ckpt_async.local_updates.step_gate import GatedWorker, GateTimeoutError, StepGate, WorkerLostError
from ckpt_async.local_updates.torchft import TorchftLoop
from ckpt_async.local_updates.worker_state import StreamCursor, WorkerState

__all__ = [
    "DiLoCo",
    "DiLoCoState",
    "GateTimeoutError",
    "GatedWorker",
    "OuterLoop",
    "StepGate",
    "StreamCursor",
    "TorchftLoop",
    "WorkerLostError",
    "WorkerState",
]
