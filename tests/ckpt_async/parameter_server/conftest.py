"""Fixtures of the tests of asynchronous training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ckpt_async.parameter_server.training_threads import Threads


@pytest.fixture
def threads(tmp_path: Path) -> Iterator[Callable[..., Threads]]:
    opened = []

    def start(**options: Any) -> Threads:
        opened.append(Threads(tmp_path, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
