"""Asynchronous training with parameter servers, whose checkpoints are consistent cuts (``docs/async_training.md``)."""

from ckpt_async.parameter_server.client import ParameterClient, RemoteOptimizer, UpdateSampler
from ckpt_async.parameter_server.coordinator import TrainingCoordinator
from ckpt_async.parameter_server.frames import Frame
from ckpt_async.parameter_server.server import ParameterServer
from ckpt_async.parameter_server.store import CutCheckpoint, CutStore
from ckpt_async.parameter_server.transport import Handler, Peer, PeerLostError, SocketTransport, Transport

__all__ = [
    "CutCheckpoint",
    "CutStore",
    "Frame",
    "Handler",
    "ParameterClient",
    "ParameterServer",
    "Peer",
    "PeerLostError",
    "RemoteOptimizer",
    "SocketTransport",
    "TrainingCoordinator",
    "Transport",
    "UpdateSampler",
]
