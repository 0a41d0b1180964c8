"""Two parameter servers, three workers at different iterations; all are killed. What is the checkpoint?

    python examples/async_parameter_server/run.py --output async_demo

Real processes, connected by sockets. While they train, each of them saves for itself by its own clock (the naive way),
and one checkpoint is taken that is a consistent cut. All are killed with SIGKILL. Both ways are judged by the tallies
inside the model, and the training resumes from the cut to its end. Writes ``picture.png`` and ``page.html``. Exits with
1 unless the cut is right and the naive way is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from page import build_page
from picture import Diagram
from tracing import TracingTransport, read_trace
from training import DATA, ROUNDS, SERVERS, WORKERS, coordinate, data_number, serve, work

from ckpt_async.consistent_cut import COORDINATOR, UpdateId
from ckpt_async.parameter_server import CutStore, SocketTransport

FORK = multiprocessing.get_context("fork")
CUT_AFTER, KILL_AFTER = 2, 6  # updates
LIMIT = 120.0  # seconds


class Life:
    """All processes, from one start to the end or the kill."""

    def __init__(self, directory: Path, number: int) -> None:
        self.trace = directory / f"trace-{number}"
        self._directory = directory
        self._due = FORK.Event()
        self._count = FORK.Value("i", 0)
        receiver, sender = FORK.Pipe(duplex=False)
        self._processes = [
            self._start(lambda: coordinate(directory, self._transport(COORDINATOR), sender.send, self._due))
        ]
        address = receiver.recv()
        for name in SERVERS:
            self._processes.append(self._start(lambda name=name: serve(directory, self._transport(name), address)))
        for name in WORKERS:
            action = lambda name=name: work(directory, self._transport(name), address, self._pushed)  # noqa: E731
            self._processes.append(self._start(action))

    def _transport(self, name: str) -> TracingTransport:
        return TracingTransport(SocketTransport(name), self.trace)

    def _pushed(self) -> None:
        with self._count.get_lock():
            self._count.value += 1

    def _start(self, action: Callable[[], None]) -> Any:
        process = FORK.Process(target=action, daemon=True)
        process.start()
        return process

    def train_and_kill(self) -> None:
        """Request a checkpoint during the training; kill all processes once it and some more updates are done."""
        store = CutStore(self._directory / "checkpoints")
        self._wait(lambda: self._count.value >= CUT_AFTER)
        self._due.set()
        self._wait(lambda: bool(store.committed()) and self._count.value >= KILL_AFTER)
        for process in self._processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join()

    def train_to_the_end(self) -> None:
        """Wait until all processes have ended well."""
        self._wait(lambda: not any(process.is_alive() for process in self._processes))
        codes = [process.exitcode for process in self._processes]
        if any(codes):
            raise RuntimeError(f"a process has failed: exit codes {codes}")

    def _wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError("the training has got stuck")
            time.sleep(0.01)


def naive_result(directory: Path) -> tuple[list[list[Any]], dict[str, float]]:
    """Return each server's tallies at the end if all resumed from what they had saved for themselves, and when."""
    saved = {name: json.loads((directory / "naive" / f"{name}.json").read_text()) for name in (*SERVERS, *WORKERS)}
    positions = {stream: saved[name]["state"][0] for stream, name in enumerate(WORKERS)}
    again = [
        data_number(UpdateId(stream, seq))
        for stream, position in positions.items()
        for seq in range(position + 1, ROUNDS + 1)
    ]
    rows = []
    for name in SERVERS:
        counts = [int(count) for count in saved[name]["state"]]
        for number in again:
            counts[number] += 1
        rows.append([name, *counts])
    return rows, {name: content["time"] for name, content in saved.items()}


def tallies(store: CutStore) -> tuple[list[list[Any]], Any]:
    """Return the servers' tallies in the newest checkpoint, and its cut."""
    newest = store.newest()
    assert newest is not None
    with newest:
        model = newest.model()
    return [[name, *map(int, model[f"tally.{number}"])] for number, name in enumerate(SERVERS)], newest.cut


def main() -> int:
    """Run the example, print its tables, write its picture and its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("async_demo"), help="directory, which is emptied")
    output = parser.parse_args().output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    store = CutStore(output / "checkpoints")

    first = Life(output, 1)
    first.train_and_kill()
    naive, saved_at = naive_result(output)
    at_cut, cut = tallies(store)
    svg = Diagram(read_trace(first.trace), cut.snapshot_id, saved_at).save(output / "picture.png")
    words = cut.vector.in_words()

    Life(output, 2).train_to_the_end()
    at_end, end = tallies(store)

    expected_at_cut = [int(cut.vector[number % len(WORKERS)] > number // len(WORKERS)) for number in range(DATA)]
    is_right = all(counts == expected_at_cut for _, *counts in at_cut) and all(
        count == 1 for _, *counts in at_end for count in counts
    )
    is_naive_wrong = any(count != 1 for _, *counts in naive for count in counts)
    tables = {
        "Every process had saved for itself, and resumes from that": naive,
        "The cut, and on from there": at_end,
    }
    (output / "page.html").write_text(build_page(svg, tables, words))
    print(f"\nWhich data? {words}.\nWhich model? How often each data is in, on each server, at the end:")
    for title, rows in tables.items():
        print(f"\n{title}:")
        for name, *counts in rows:
            print(f"  {name}  " + "  ".join(f"Data-{number + 1}: {count}" for number, count in enumerate(counts)))
    summary = {"cut": dict(cut.vector), "at_cut": at_cut, "at_end": at_end, "end": dict(end.vector), "naive": naive}
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\nthe naive way is {'wrong' if is_naive_wrong else 'right, by chance: run it again'}; ", end="")
    print(f"the cut is {'right' if is_right else 'WRONG'}; picture and page are in {output}")
    return 0 if is_right and is_naive_wrong else 1


if __name__ == "__main__":
    sys.exit(main())
