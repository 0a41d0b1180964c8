"""S3 through TLS: the client does not hash uploads once more, as it does on plain connections."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ckpt_core import Checkpointer
from ckpt_core.storage.s3_settings import s3_defaults
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server, start_rclone

__all__ = ["server_of", "servers"]

NOT_HASHED = "UNSIGNED-PAYLOAD"


def certificate(path: Path) -> Path:
    """Write a certificate for this machine, and its key, into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return path


def hashes_sent(server: Server, options: dict[str, Any]) -> set[str]:
    """Save a checkpoint of two parts by s3fs, load it, and return which hashes the uploads sent."""
    sent: list[tuple[str, str]] = []
    path = f"{server.new_bucket()}/a.ckpt"
    state = {"w": torch.randn(6 * 2**20)}
    with Checkpointer(strategy="sync", storage_options={**options, "backend": "fsspec"}) as checkpointer:
        filesystem = checkpointer._storage_for(path)._filesystem  # type: ignore[attr-defined]

        def note(request: Any, **_: Any) -> None:
            sent.append((request.method, request.headers["X-Amz-Content-SHA256"].decode()))

        filesystem.connect()
        filesystem.s3.meta.events.register("before-send.s3.UploadPart", note)
        checkpointer.save(state, path)
        assert torch.equal(checkpointer.load(path)["w"], state["w"])
    assert len(sent) == 2
    return {told for _, told in sent}


def test_through_tls(tmp_path: Path) -> None:
    with start_rclone(tmp_path, certificate(tmp_path / "certificate.pem")) as server:
        assert hashes_sent(server, dict(server.options)) == {NOT_HASHED}
        signed = {**server.options, "config_kwargs": {"s3": {"payload_signing_enabled": True}}}
        assert len(hashes_sent(server, signed) - {NOT_HASHED}) == 2, "who wants it has it"


def test_a_plain_connection(server_of: Callable[[str], Server]) -> None:
    server = server_of("rclone")
    assert len(hashes_sent(server, dict(server.options)) - {NOT_HASHED}) == 2


@pytest.mark.parametrize(
    ("options", "environment", "hashed"),
    [
        ({}, {}, False),
        ({"endpoint_url": "https://store.example.org"}, {}, False),
        ({"endpoint_url": "http://store.example.org"}, {}, True),
        ({"client_kwargs": {"endpoint_url": "http://store.example.org"}}, {}, True),
        ({"use_ssl": False}, {}, True),
        ({}, {"AWS_ENDPOINT_URL": "http://store.example.org"}, True),
        ({"endpoint_url": "https://store.example.org"}, {"AWS_ENDPOINT_URL": "http://other.example.org"}, False),
        ({"config_kwargs": {"s3": {"payload_signing_enabled": True, "addressing_style": "path"}}}, {}, True),
    ],
)
def test_where_the_bytes_are_hashed(
    options: dict[str, Any], environment: dict[str, str], hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = s3_defaults(options)["config_kwargs"].get("s3", {})
    assert settings.get("payload_signing_enabled", True) is hashed
    assert {**options.get("config_kwargs", {}).get("s3", {}), **settings} == settings, "what the user said stays"


def test_an_endpoint_of_fsspecs_own_configuration_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "s3" in s3_defaults({})["config_kwargs"]
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://store.example.org"})
    assert "s3" not in s3_defaults({})["config_kwargs"]
