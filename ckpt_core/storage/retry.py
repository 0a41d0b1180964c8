"""Retry requests to an object store after transient failures, and only after those."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import stamina

from ckpt_core.errors import CheckpointError
from ckpt_core.storage.failures import Describe

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_ATTEMPTS = 10
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
# Error codes that are transient although their HTTP status is not: a conflict of the moment, or bytes lost on the way.
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "OperationAborted",
        "RequestTimeout",
        "SlowDown",
        "XAmzContentSHA256Mismatch",
    }
)
# Exception classes of fsspec's clients for broken and silent connections; by name, so that no client is imported.
_TRANSIENT_CLASSES = frozenset(
    {
        "ChunkedEncodingError",
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectionError",
        "FSTimeoutError",
        "HTTPClientError",
        "IncompleteAnswerError",
        "IncompleteRead",
        "IncompleteReadError",
        "ProtocolError",
        "ResponseParserError",
        "ServiceRequestError",
        "ServiceResponseError",
        "Timeout",
        "TimeoutError",
    }
)


class IncompleteAnswerError(Exception):
    """A response reports success but is not the store's own: it is empty, or comes from a proxy in between."""


_SILENCE = 2.0  # seconds
_REPEATED = " retries, max_retries"  # in errors of obstore that has already retried the request itself
_PATIENCE = 300.0  # seconds since the first failure
_CALM = 60.0  # after so many seconds without a failed request, a failure counts as the first one again


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        # Do not follow the context of our own errors: it is another error, which was being handled at the time.
        link = link.__cause__ or (None if isinstance(link, CheckpointError) else link.__context__)


def _status_and_code(error: BaseException) -> tuple[int | None, str]:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return (int(status) if status else None), str(response.get("Error", {}).get("Code", ""))
    # azure, aiohttp, gcsfs. Only gcsfs's HttpError has the status in "code": aiohttp's parser errors have other codes.
    names = ("status_code", "status", "code") if type(error).__name__ == "HttpError" else ("status_code", "status")
    for name in names:
        value = getattr(error, name, None)
        if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
            return int(value), str(getattr(error, "error_code", ""))
    return None, ""


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status that led to ``error``; None if no server has answered."""
    return next((status for link in _chain(error) if (status := _status_and_code(link)[0]) is not None), None)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed a moment later: overload, internal errors, broken connections."""
    for link in _chain(error):
        if any(cls.__name__ in _TRANSIENT_CLASSES for cls in type(link).__mro__):
            return True
        status, code = _status_and_code(link)
        if status is not None:
            return status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES
    return False


class _TransientError(Exception):
    """Wraps a failure for stamina, which logs what it retries: the original, maybe with credentials, stays out."""

    def __init__(self, failure: CheckpointError, *, is_first: bool) -> None:
        super().__init__(failure.message)
        self.failure, self.is_first = failure, is_first


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Return False for stamina's log lines about our retries, which contain nothing but the name of its event."""
    return not str(record.__dict__.get("stamina.caused_by", "")).startswith(_TransientError.__name__)


logging.getLogger("stamina").addFilter(_is_not_ours)


@contextlib.contextmanager
def report_silence(describe: Describe) -> Iterator[None]:
    """Call :attr:`Retries.on_silence`, on a timer thread, if the body takes longer than two seconds."""
    tell = Retries.on_silence
    if tell is None:
        yield
        return
    timer = threading.Timer(_SILENCE, lambda: tell(describe(TimeoutError()).path or ""))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Retries:
    """Carries out requests to one store; transient failures are retried with growing, random pauses.

    A request has up to 10 attempts, ``first_attempts`` while the store has never answered. ``patience`` seconds after
    the first failure, each further request has one attempt until the store answers: the end of a run waits only once.
    """

    #: Called, on another thread, with the URL of a store that has never answered while the caller waits for it.
    on_silence: ClassVar[Callable[[str], None] | None] = None

    def __init__(self, first_attempts: int = 3, patience: float = _PATIENCE) -> None:
        # If a store has never answered, a wrong address is more likely than an outage.
        self._first_attempts = first_attempts
        self._patience = patience
        self._has_answered = False
        self._failing_since, self._failed_at, self._warned_at = 0.0, -float("inf"), -float("inf")  # by time.monotonic()

    @property
    def has_given_up(self) -> bool:
        """Whether the store has failed for so long that no request is retried."""
        now = time.monotonic()
        return now - self._failed_at < _CALM and now - self._failing_since >= self._patience

    def call(self, request: Callable[[], Result], describe: Describe) -> Result:
        """Call ``request``, with retries, and return its result; ``describe`` turns its error into one for the user."""
        try:
            with contextlib.nullcontext() if self._has_answered else report_silence(describe):
                for attempt in self._attempts():
                    with attempt:
                        began = time.monotonic()
                        try:
                            result = request()
                        except Exception as error:  # noqa: BLE001 - described and raised below
                            failure = self._judged(error, describe, began)
                        else:
                            self._has_answered, self._failed_at = True, -float("inf")
                            return result
                        raise failure
        except _TransientError as last:
            failure = last.failure
        raise failure

    def _attempts(self) -> Any:
        failed = itertools.count(1)

        def is_worth_another(error: Exception) -> bool:
            if not isinstance(error, _TransientError):
                return False
            count = next(failed)
            most = _ATTEMPTS if self._has_answered else self._first_attempts
            if count >= most or self.has_given_up:
                return False
            told = error.failure.message, error.failure.path
            now = time.monotonic()
            if error.is_first and now - self._warned_at > _CALM:  # warn once, however many requests fail meanwhile
                self._warned_at = now
                logger.warning("%s (%s); trying again for at most %g s", *told, self._patience)
            else:
                logger.info("%s (%s); trying again, %d of %d", *told, count, most - 1)
            return True

        return stamina.retry_context(
            is_worth_another, attempts=_ATTEMPTS, timeout=_PATIENCE, wait_initial=0.2, wait_max=30.0, wait_jitter=1.0
        )

    def _judged(self, error: Exception, describe: Describe, began: float) -> Exception:
        if http_status(error) is not None:
            self._has_answered = True
        failure, is_worth_more = describe(error), is_transient(error)
        is_first = began - self._failed_at > _CALM
        if is_worth_more or _REPEATED in str(error):
            self._failing_since = began if is_first else self._failing_since
            self._failed_at = time.monotonic()
        return _TransientError(failure, is_first=is_first) if is_worth_more else failure
