"""Make an object only if there is none, on stores that have such a request and on those that only seem to."""

from __future__ import annotations

import abc
import logging
import time
import uuid

__all__ = ["PROBE_PREFIX", "ConditionalStore", "create_new"]

logger = logging.getLogger(__name__)

PROBE_PREFIX = ".ckpt-probe-"
# Another writer has looked before it could see ours, and has written at the latest so much later.
_SETTLING_SECONDS = 2.0


class ConditionalStore(abc.ABC):
    """The requests that :func:`create_new` is made of.

    Attributes:
        honours_conditions: Whether :meth:`put_new` does what it says, by bucket; filled by a probe.
    """

    honours_conditions: dict[str, bool]

    @abc.abstractmethod
    def put_new(self, path: str, data: bytes) -> bool:
        """Make an object by one conditional request; False if there is one. Stores that ignore the condition overwrite."""

    @abc.abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Make an object, replacing what is there."""

    @abc.abstractmethod
    def get(self, path: str) -> bytes | None:
        """Return an object's bytes, or None if there is none."""

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object."""


def create_new(store: ConditionalStore, path: str, data: bytes) -> bool:
    """Make ``path`` an object of ``data`` unless there is one already; return whether the object there is ours.

    Where the store honours conditional requests, of several writers exactly one gets True. Where it does not, they write,
    wait for two seconds and look whose object it is: two writers can both get True only if the request of one takes longer
    than that.

    Args:
        store: Where.
        path: URL.
        data: Differs from what any other writer would write: it holds a random token of this one.
    """
    bucket = path.partition("://")[2].partition("/")[0]
    if bucket not in store.honours_conditions:
        store.honours_conditions[bucket] = _probe(store, path)
    if store.honours_conditions[bucket]:
        # Refused, it may still be ours: the answer to an earlier attempt was lost.
        return store.put_new(path, data) or store.get(path) == data
    if store.get(path) is not None:
        return False
    store.put(path, data)
    time.sleep(_SETTLING_SECONDS)
    return store.get(path) == data


def _probe(store: ConditionalStore, path: str) -> bool:
    probe = f"{path.rpartition('/')[0]}/{PROBE_PREFIX}{uuid.uuid4().hex}"
    store.put_new(probe, b"first")
    try:
        honours = not store.put_new(probe, b"second")
    finally:
        store.delete(probe)
    if not honours:
        logger.info("the store of %s ignores conditional requests: exclusive objects are checked after a pause", probe)
    return honours
