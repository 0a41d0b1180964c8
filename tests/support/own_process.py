"""Runs tests marked ``own_process`` in a child process, one per test file, and reports them as if they ran here.

For tests whose effects stay in a process, like registering a device with torch, and those that may end it by SIGSEGV.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

_REPORTS_TO = "CKPT_TESTS_REPORTS_TO"  # the file descriptor that a child writes its reports to


class OwnProcesses:
    """The plugin in the process that pytest was started in."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Take the reports of a marked test from the child of its file."""
        if item.get_closest_marker("own_process") is None or item.get_closest_marker("skip") is not None:
            return None
        if self._child is None or self._child.path != item.path:
            self._close()
            self._child = _Child(item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._child.reports_of(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # An unmarked test before this one left its module's fixtures set up; pytest has no public way to end them.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def pytest_sessionfinish(self) -> None:
        """End the child when the session ends early."""
        self._close()

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None


class _Child:
    def __init__(self, first: pytest.Item) -> None:
        config, self.path = first.config, first.path
        items = [i for i in first.session.items if i.path == self.path and i.get_closest_marker("own_process")]
        # Marked tests before the first belong to another worker, or have already run.
        self._folder = tempfile.TemporaryDirectory(prefix="own-process-")
        names = Path(self._folder.name, "names")
        names.write_text("".join(f"{item.nodeid}\n" for item in items[items.index(first) :]), encoding="utf-8")
        self._output = Path(self._folder.name, "output")
        self._arrived: dict[str, list[pytest.TestReport]] = {}
        self._ended: set[str] = set()
        # pytest-timeout's thread also ends a process that hangs inside torch; its signal would not.
        options = ("-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout_method=thread", "-o", "timeout=280")
        ini = ("-c", str(config.inipath)) if config.inipath else ()
        reading, writing = os.pipe()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *ini, f"--rootdir={config.rootpath}", *options, f"@{names}"],
                cwd=config.rootpath,
                env={**os.environ, _REPORTS_TO: str(writing)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
            )
        os.close(writing)
        self._reading: IO[str] = os.fdopen(reading, encoding="utf-8")

    def reports_of(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        while item.nodeid not in self._ended:
            line = self._reading.readline()
            if not line:
                break
            sent = json.loads(line)
            if "ended" in sent:
                self._ended.add(sent["ended"])
                continue
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=sent)
            if isinstance(report.longrepr, list):  # a skip's (file, line, reason), which JSON made a list
                report.longrepr = tuple(report.longrepr)
            self._arrived.setdefault(report.nodeid, []).append(report)
        yield from self._arrived.pop(item.nodeid, [])
        if item.nodeid not in self._ended:
            yield self._report_of_death(item)

    def _report_of_death(self, item: pytest.Item) -> pytest.TestReport:
        status = self._process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        output = self._output.read_text(encoding="utf-8", errors="replace")
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the process of this file's tests ended {how}\n{output[-6000:]}",
            when="call",
        )

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reading.close()
        self._folder.cleanup()


class ChildReports:
    """The plugin in a child: sends the reports to the parent process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._to = os.fdopen(int(os.environ.pop(_REPORTS_TO)), "w", encoding="utf-8")

    @staticmethod
    def is_needed() -> bool:
        """Whether this process is such a child."""
        return _REPORTS_TO in os.environ

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        self._send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Tell the parent that this test has no more reports."""
        self._send({"ended": nodeid})

    def _send(self, data: object) -> None:
        self._to.write(json.dumps(data) + "\n")
        self._to.flush()
