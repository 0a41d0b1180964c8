"""Records every message that is sent or received, for the picture."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ckpt_async.parameter_server import Frame, Handler, Peer, Transport


class TracingTransport:
    """Passes everything on to another transport, and appends a line to a file for each message.

    Args:
        inner: The transport that does the work.
        directory: Directory for the file.
    """

    def __init__(self, inner: Transport, directory: Path) -> None:
        self.name = inner.name
        self.address = inner.address
        self._inner = inner
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"{inner.name}.jsonl").open("a", buffering=1)
        self._lock = threading.Lock()

    def start(self, handler: Handler, on_lost: Callable[[Peer], None]) -> None:
        def noting(peer: Peer, frame: Frame) -> Frame | None:
            self._note("receive", peer.name, self.name, frame.content)
            answer = handler(peer, frame)
            if answer is not None:
                self._note("send", self.name, peer.name, answer.content)
            return answer

        self._inner.start(noting, on_lost)

    def connect(self, name: str, address: str) -> None:
        self._inner.connect(name, address)

    def send(self, to: str, frame: Frame) -> None:
        self._note("send", self.name, to, frame.content)
        self._inner.send(to, frame)

    def request(self, to: str, frame: Frame) -> Future[Frame]:
        future = self._inner.request(to, frame)
        future.add_done_callback(lambda done: self._note_answer(to, done))
        return future

    def close(self) -> None:
        self._inner.close()

    def _note_answer(self, to: str, done: Future[Frame]) -> None:
        if done.exception() is None:
            self._note("receive", to, self.name, done.result().content)

    def _note(self, event: str, sender: str, receiver: str, content: dict[str, Any]) -> None:
        header = content.get("header") or content
        record = {
            "time": time.monotonic(),
            "event": event,
            "sender": sender,
            "receiver": receiver,
            "kind": content.get("kind"),
            "snapshot": header["tag"][1] if "tag" in header else None,
            "update": header.get("update"),
            "version": header.get("version"),
        }
        with self._lock:
            self._file.write(json.dumps(record) + "\n")


def read_trace(directory: Path) -> list[dict[str, Any]]:
    """Return all notes in the order of their time, without lines that a kill has cut off."""
    notes = []
    for file in sorted(directory.glob("*.jsonl")):
        notes += [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted(notes, key=lambda note: note["time"])
