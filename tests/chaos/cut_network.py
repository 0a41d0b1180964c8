"""A network that delays and repeats messages at random, so that nothing arrives in order."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from ckpt_async.parameter_server import Frame, Handler, Peer, Transport

DELAY = 0.01  # seconds at most
DELAY_OF_BEGIN = (
    0.1  # so that some workers learn of a snapshot from pulled parameters, before the coordinator's message arrives
)
REPEATED = 0.1  # share of the messages that arrive twice


class ReorderingTransport:
    """Delays each frame that another transport sends by a random time, and sends some of them twice."""

    def __init__(self, inner: Transport, seed: object) -> None:
        self.name = inner.name
        self.address = inner.address
        self._inner = inner
        self._random = random.Random(f"{inner.name}/{seed}")
        self._heap: list[tuple[float, int, str, Frame]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def start(self, handler: Handler, on_lost: Callable[[Peer], None]) -> None:
        self._inner.start(handler, on_lost)

    def connect(self, name: str, address: str) -> None:
        self._inner.connect(name, address)

    def send(self, to: str, frame: Frame) -> None:
        kept = Frame(frame.content, {name: tensor.clone() for name, tensor in frame.tensors.items()})
        with self._wake:
            for _ in range(2 if self._random.random() < REPEATED else 1):
                longest = DELAY_OF_BEGIN if frame.content.get("kind") == "Begin" else DELAY
                due = time.monotonic() + self._random.random() * longest * (self._random.random() < 0.5)
                heapq.heappush(self._heap, (due, next(self._numbers), to, kept))
            self._wake.notify()

    def request(self, to: str, frame: Frame) -> Future[Frame]:
        return self._inner.request(to, frame)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self._inner.close()

    def _deliver(self) -> None:
        while True:
            with self._wake:
                while not self._heap and not self._closed:
                    self._wake.wait()
                if not self._heap:
                    return
                due, _, to, frame = self._heap[0]
                wait = due - time.monotonic()
                if wait > 0 and not self._closed:
                    self._wake.wait(wait)
                    continue
                heapq.heappop(self._heap)
            self._inner.send(to, frame)
