"""Credentials in ``storage_options`` and URLs are shown nowhere."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, CheckpointError, StorageError
from ckpt_core.storage import storage_for
from ckpt_core.storage.failures import Secrets, describer, translated
from tests.support.ports import free_port
from tests.support.servers import Server

SECRET = "hX7/kfoo+bar9qZ="
QUOTED = "hX7%2Fkfoo%2Bbar9qZ%3D"
KEY_ID = "AKIAIOSFODNN7EXAMPLE"


def everything_about(error: BaseException) -> str:
    return "".join([repr(error), str(error), *traceback.format_exception(error)])


@pytest.mark.parametrize(
    "options",
    [
        {"secret": SECRET},
        {"client_kwargs": {"aws_secret_access_key": SECRET}},
        {"token": {"private_key": SECRET, "client_email": "me@example.org"}},
        {"connection_string": f"AccountName=me;AccountKey={SECRET};EndpointSuffix=core.windows.net"},
        {"sas_token": SECRET},
        {"auth": ("me", SECRET)},
    ],
)
def test_what_is_hidden(options: dict[str, Any]) -> None:
    secrets = Secrets({**options, "endpoint_url": "http://store.example.org", "client_kwargs_region": "eu-west-1"})
    text = f"denied for {SECRET} and {QUOTED} at http://store.example.org in eu-west-1"
    assert secrets.hide(text) == "denied for *** and *** at http://store.example.org in eu-west-1"
    assert SECRET not in repr(secrets)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ftp://me:pass@host/a.ckpt", "ftp://***@host/a.ckpt"),
        ("https://host/a?sv=1&sig=abc%2F&se=2", "https://host/a?sv=1&sig=***&se=2"),
        (
            "https://host/a?X-Amz-Credential=AK&X-Amz-Signature=0a1b",
            "https://host/a?X-Amz-Credential=***&X-Amz-Signature=***",
        ),
        ("s3://bucket/a@b:c/d.ckpt", "s3://bucket/a@b:c/d.ckpt"),
    ],
)
def test_credentials_in_urls(text: str, shown: str) -> None:
    assert Secrets({}).hide(text) == shown


def test_an_error_that_shows_a_secret_is_cut_off_from_what_is_raised() -> None:
    secrets = Secrets({"secret": SECRET})
    with pytest.raises(StorageError) as caught, translated(describer(secrets, "write", "s3://bucket/a.ckpt")):
        try:
            raise ValueError(f"bad key {SECRET}")
        except ValueError as inner:
            raise OSError(5, "refused") from inner
    assert SECRET not in everything_about(caught.value)
    assert caught.value.errno == 5
    with pytest.raises(StorageError) as caught, translated(describer(secrets, "write", "s3://bucket/a.ckpt")):
        raise OSError(5, "refused")
    assert isinstance(caught.value.__cause__, OSError), "what is harmless stays for the curious"


@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
def test_no_credential_in_errors_logs_or_repr(
    backend: str, server_of: Callable[[str], Server], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(backend)
    endpoint = server_of("ceph").endpoint
    options = {"endpoint_url": endpoint, "key": KEY_ID, "secret": SECRET, "backend": backend}
    caplog.set_level(logging.INFO)  # botocore's own debug lines show its requests
    storage = storage_for("s3://bucket", options)
    texts = [repr(storage), str(storage), repr(vars(storage).get("_secrets"))]
    with Checkpointer(strategy="sync", storage=storage) as checkpointer:
        for ask in (
            lambda: storage.open("s3://bucket/a.ckpt"),
            lambda: storage.list("s3://bucket"),
            lambda: checkpointer.save({}, "s3://bucket/a.ckpt"),
        ):
            with pytest.raises(CheckpointError) as caught:
                ask()
            texts.append(everything_about(caught.value))
    texts += [record.getMessage() + repr(vars(record)) for record in caplog.records]
    assert len(texts) >= 6
    for text in texts:
        assert SECRET not in text
        assert KEY_ID not in text
    assert pickle.loads(pickle.dumps(storage)).exists is not None, "settings travel to spawned processes"


@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
def test_a_store_that_never_answers_is_given_up_soon(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip(backend)
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "key": KEY_ID, "secret": SECRET}
    if backend == "obstore":
        options |= {"backend": backend, "retry_config": {"max_retries": 1}}
    storage = storage_for("s3://bucket", options)
    with pytest.raises(StorageError, match="storage_options") as caught:
        storage.open("s3://bucket/a.ckpt")
    assert SECRET not in everything_about(caught.value) + "".join(repr(vars(record)) for record in caplog.records)


@pytest.mark.parametrize(
    ("url", "module", "remedy"),
    [
        ("s3://b/a", "s3fs", "pip install '.[s3]'"),
        ("abfs://b/a", "adlfs", "pip install '.[azure]'"),
        ("gs://b/a", "gcsfs", "pip install '.[gcs]'"),
    ],
)
def test_a_missing_package_is_named(
    url: str, module: str, remedy: str, fork_script: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text("raise ImportError('not here')\n")
    script = f"""
        from ckpt_core import StorageError
        from ckpt_core.storage import storage_for
        try:
            storage_for({url!r}, {{"secret": {SECRET!r}}})
        except StorageError as error:
            print(error)
    """
    shown = fork_script(script, env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}).stdout
    assert remedy in shown
    assert url in shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("nonsense://b/a", {}, "Protocol not known"),
        ("s3://b/a", {"backend": "carrier pigeon"}, "carrier pigeon"),
        ("s3://b/a", {"backend": "obstore", "no_such_option": "x", "secret": SECRET}, "no_such_option"),
        ("sftp://b/a", {"backend": "obstore"}, "sftp"),
        ("s3://b/a", {"config_kwargs": {"no_such_option": 1}, "secret": SECRET}, "no_such_option"),
    ],
)
def test_settings_that_do_not_fit(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StorageError) as caught:
        storage_for(url, options).exists(url)
    assert message in str(caught.value)
    assert SECRET not in everything_about(caught.value)
