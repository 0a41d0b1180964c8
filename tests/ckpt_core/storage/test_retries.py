"""Which errors are worth another attempt, and how many attempts there are."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import stamina

from ckpt_core.errors import CheckpointError, StorageError
from ckpt_core.storage import storage_for
from ckpt_core.storage.retry import Retries, http_status, is_transient


def client_error(status: int, code: str) -> Exception:
    botocore = pytest.importorskip("botocore.exceptions")
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = botocore.ClientError(response, "PutObject")
    return error


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


def aiohttp_payload_error() -> Exception:
    aiohttp = pytest.importorskip("aiohttp")
    http_exceptions = pytest.importorskip("aiohttp.http_exceptions")
    # A reply that was cut off: aiohttp gives its own error the code 400
    inner = http_exceptions.ContentLengthError("Not enough data to satisfy content length header")
    error: Exception = caused(aiohttp.ClientPayloadError("Response payload is not completed"), inner)
    return error


def azure_error(status: int) -> Exception:
    exceptions = pytest.importorskip("azure.core.exceptions")
    error: Exception = exceptions.HttpResponseError("refused")
    error.status_code = status  # type: ignore[attr-defined]
    return error


def gcs_error(code: int) -> Exception:
    error: Exception = pytest.importorskip("gcsfs.retry").HttpError({"code": code, "message": "no"})
    return error


@pytest.mark.parametrize(
    ("make", "transient", "status"),
    [
        (lambda: ConnectionResetError(104, "reset"), True, None),
        (lambda: BrokenPipeError(32, "pipe"), True, None),
        (TimeoutError, True, None),
        (asyncio.TimeoutError, True, None),
        (aiohttp_payload_error, True, None),
        (lambda: client_error(500, "InternalError"), True, 500),
        (lambda: client_error(503, "SlowDown"), True, 503),
        (lambda: client_error(429, "TooManyRequests"), True, 429),
        (lambda: client_error(400, "RequestTimeout"), True, 400),
        (lambda: client_error(409, "ConditionalRequestConflict"), True, 409),
        (lambda: caused(OSError(16, "busy"), client_error(503, "SlowDown")), True, 503),
        (lambda: azure_error(503), True, 503),
        (lambda: gcs_error(502), True, 502),
        (lambda: client_error(400, "EntityTooSmall"), False, 400),
        (lambda: client_error(403, "AccessDenied"), False, 403),
        (lambda: client_error(404, "NoSuchUpload"), False, 404),
        (lambda: client_error(412, "PreconditionFailed"), False, 412),
        (lambda: caused(PermissionError("no"), client_error(403, "AccessDenied")), False, 403),
        (lambda: azure_error(403), False, 403),
        (lambda: gcs_error(401), False, 401),
        (lambda: FileNotFoundError("a"), False, None),
        (lambda: PermissionError(13, "no"), False, None),
        (lambda: ValueError("a bug"), False, None),
        (lambda: caused(ValueError("a"), ConnectionResetError(104, "reset")), True, None),
    ],
)
def test_what_is_transient(make: Any, transient: bool, status: int | None) -> None:
    error = make()
    assert is_transient(error) is transient
    assert http_status(error) == status


def described(error: Exception) -> CheckpointError:
    failure = StorageError(f"cannot do it: {error}")
    failure.__cause__ = error
    return failure


class Request:
    """Raises the given errors, one at each call, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("ckpt_core.storage.retry._CALM", 1e9)  # however slow the machine is
    stamina.set_testing(True, attempts=10, cap=True)
    yield
    stamina.set_testing(False)


@pytest.mark.usefixtures("_no_pauses")
class TestRetries:
    def test_transient_failures_are_repeated(self) -> None:
        request, retries = Request(*[TimeoutError(str(number)) for number in range(2)]), Retries()
        assert retries.call(request, described) == "done"
        assert request.calls == 3
        again = Request(*[TimeoutError(str(number)) for number in range(9)])
        assert retries.call(again, described) == "done", "the store has answered once: more patience"
        assert again.calls == 10

    def test_others_are_not(self) -> None:
        request = Request(PermissionError(13, "no"))
        with pytest.raises(StorageError, match="cannot do it") as caught:
            Retries().call(request, described)
        assert request.calls == 1
        assert isinstance(caught.value.__cause__, PermissionError)

    def test_a_store_that_never_answered_gets_less_patience(self) -> None:
        request = Request(*[ConnectionRefusedError(111, "refused") for _ in range(20)])
        with pytest.raises(StorageError) as caught:
            Retries().call(request, described)
        assert request.calls == 3
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)
        busy = Request(*[client_error(503, "SlowDown") for _ in range(20)])
        with pytest.raises(StorageError):
            Retries().call(busy, described)
        assert busy.calls == 10, "a store that is busy has answered"

    def test_google_whose_client_asks_again_itself_is_asked_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        pytest.importorskip("gcsfs")

        async def sleep(seconds: float) -> None:
            pass

        monkeypatch.setattr("gcsfs.retry.asyncio", types.SimpleNamespace(sleep=sleep))
        nobody = {"token": "anon", "endpoint_url": "http://127.0.0.1:1", "skip_instance_cache": True}
        with pytest.raises(StorageError, match="ClientConnectorError"):
            storage_for("gs://bucket/run", nobody).exists("gs://bucket/run/a.ckpt")
        assert "trying again" not in caplog.text

    def test_all_that_follows_a_long_outage_is_tried_once(self) -> None:
        retries = Retries(patience=0.0)
        for _ in range(2):
            request = Request(*[client_error(503, "SlowDown") for _ in range(20)])
            with pytest.raises(StorageError):
                retries.call(request, described)
            assert request.calls == 1
            assert retries.has_given_up
        assert retries.call(Request(), described) == "done"
        assert not retries.has_given_up

    def test_a_store_that_fails_now_and_then_gives_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        retries = Retries()
        for _ in range(3):
            assert retries.call(Request(TimeoutError()), described) == "done"
        assert caplog.text.count("trying again for at most 300 s") == 1

    def test_a_client_that_repeats_by_itself_fails_as_long_as_it_takes(self) -> None:
        retries = Retries(patience=0.0)
        for text, is_outage in (("403 Forbidden", False), ("after 9 retries, max_retries: 9", True)):
            with pytest.raises(StorageError):
                retries.call(Request(RuntimeError(text)), described)
            assert retries.has_given_up is is_outage

    def test_who_waits_learns_that_a_store_has_never_answered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        silent, is_told = [], threading.Event()

        def tell(url: str) -> None:
            silent.append(url)
            is_told.set()

        monkeypatch.setattr(Retries, "on_silence", staticmethod(tell))
        retries = Retries()
        for _ in range(2):
            assert retries.call(is_told.wait, lambda error: StorageError(str(error), path="s3://bucket/file"))
        assert silent == ["s3://bucket/file"]

    def test_interrupts_are_not_failures(self) -> None:
        request = Request()
        request.errors.append(KeyboardInterrupt())  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            Retries().call(request, described)
        assert request.calls == 1
