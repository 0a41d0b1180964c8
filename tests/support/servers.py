"""Starts real servers of object stores for tests, on free ports of loopback, and stops them.

Each ``start_...`` is a context manager, which raises :class:`MissingServerError` if the server is not installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

START_SECONDS = 120.0
COMMAND_SECONDS = 120.0
CEPH_ATTEMPTS = 3
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
ACCESS_KEY = "test-access-key"
SECRET_KEY = "a-secret-that-nobody-may-read"
# Where .ci/install_servers puts npm's packages; by default in the virtual environment.
AZURITE_HOME = Path(os.environ.get("CKPT_AZURITE", Path(sys.prefix) / "azurite"))


class MissingServerError(Exception):
    """The server is not installed on this machine."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        kind: Its name.
        endpoint: ``http://127.0.0.1:<port>``.
        protocol: Protocol of the URLs of its objects.
        options: ``storage_options`` to reach it.
        home: Where it keeps files and logs.
    """

    kind: str
    endpoint: str
    protocol: str
    options: Mapping[str, Any]
    home: Path

    def through(self, endpoint: str) -> Server:
        """Return the same server, reached through a proxy at ``endpoint``."""
        return dataclasses.replace(self, endpoint=endpoint, options={**self.options, "endpoint_url": endpoint})

    def new_bucket(self) -> str:
        """Create a new bucket for a test; return its URL."""
        name = f"b{uuid.uuid4().hex[:20]}"
        if self.protocol == "s3":
            import s3fs

            s3fs.S3FileSystem(**self.options, skip_instance_cache=True).call_s3("create_bucket", Bucket=name)
        elif self.protocol == "abfs":
            import adlfs

            adlfs.AzureBlobFileSystem(**self.options).mkdir(name)
        else:
            import gcsfs

            gcsfs.GCSFileSystem(**self.options).mkdir(name)
        return f"{self.protocol}://{name}"


def s3_options(endpoint: str) -> dict[str, Any]:
    """Return the ``storage_options`` for one of our S3 servers."""
    return {"endpoint_url": endpoint, "key": ACCESS_KEY, "secret": SECRET_KEY}


def _require_packages(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingServerError(f"{', '.join(missing)} is not installed")


def _require_programs(*names: str) -> None:
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise MissingServerError(f"{', '.join(missing)} is not installed (.ci/install_servers does it)")


def _answers(endpoint: str) -> bool:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without certificates, which take long to load
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        urllib.request.urlopen(endpoint, timeout=5, context=anybody).close()
    except urllib.error.HTTPError:
        return True  # an error is an answer, too
    except OSError:
        return False
    return True


def _wait(process: subprocess.Popen[bytes], is_ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{log.name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


@contextlib.contextmanager
def _running(
    command: list[str], home: Path, is_ready: Callable[[], bool], *, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server as the leader of a process group of its own; kill the group in the end."""
    log = home / f"{Path(command[0]).name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            cwd=home,
        )
    try:
        _wait(process, is_ready, log)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def start_moto(home: Path) -> Iterator[Server]:
    """Start moto: a simulation of S3 in Python, all in memory; fast to start."""
    _require_packages("moto", "flask", "s3fs")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tests.support.moto_server", str(port)]
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with _running(command, home, lambda: _answers(f"{endpoint}/moto-api/"), env=env):
        yield Server("moto", endpoint, "s3", s3_options(endpoint), home)


@contextlib.contextmanager
def start_rclone(home: Path, certificate: Path | None = None) -> Iterator[Server]:
    """Start ``rclone serve s3``: a real server over a directory, which silently ignores preconditions.

    With ``certificate``, a file that also contains the key, the server speaks TLS.
    """
    program = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    if not Path(program).exists():
        raise MissingServerError("rclone is not installed (.ci/install_servers does it)")
    _require_packages("s3fs")
    address = f"127.0.0.1:{free_port()}"
    endpoint = f"http://{address}" if certificate is None else f"https://{address}"
    (home / "data").mkdir()
    command = [program, "serve", "s3", "--config", "/dev/null", "--addr", address]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(home / "data")]
    options = s3_options(endpoint)
    if certificate is not None:
        command += ["--cert", str(certificate), "--key", str(certificate)]
        options["client_kwargs"] = {"verify": str(certificate)}
    with _running(command, home, lambda: _answers(endpoint)):
        yield Server("rclone", endpoint, "s3", options, home)


@contextlib.contextmanager
def start_azurite(home: Path) -> Iterator[Server]:
    """Start Azurite: Microsoft's own simulation of Azure Blob Storage."""
    program = AZURITE_HOME / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        raise MissingServerError(f"there is no {program} (.ci/install_servers installs it)")
    _require_packages("adlfs")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [str(program), "--silent", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    account = "devstoreaccount1"
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={AZURITE_KEY};"
        f"BlobEndpoint={endpoint}/{account};"
    )
    with _running(command, home, lambda: _answers(endpoint)):
        yield Server("azurite", endpoint, "abfs", {"connection_string": connection}, home)


@contextlib.contextmanager
def start_gcs(home: Path) -> Iterator[Server]:
    """Start gcp-storage-emulator: a simulation of Google Cloud Storage."""
    _require_packages("gcp_storage_emulator", "gcsfs")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    program = "from gcp_storage_emulator.__main__ import main; main()"
    arguments = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
    with _running([sys.executable, "-c", program, *arguments], home, lambda: _answers(endpoint)):
        yield Server("gcs", endpoint, "gs", {"endpoint_url": endpoint, "token": "anon", "project": "test"}, home)


CEPH_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mon data avail warn = 2
mon pg warn min per osd = 0
ms bind msgr2 = false
public addr = 127.0.0.1
run dir = {home}
log file = {home}/$name.log
admin socket = {home}/$name.asok
pid file = {home}/$name.pid
keyring = {home}/keyring
mon data = {home}/mon
osd data = {home}/osd0
osd objectstore = memstore
osd memory target = 1073741824
# An OSD that has only just found the monitor may be told "wrong fsid" by it and give up: we say where it is.
osd crush update on start = false
osd class update on start = false
memstore device bytes = 3221225472
[mon.a]
host = {host}
mon addr = v1:127.0.0.1:{mon_port}
[client.rgw]
rgw data = {home}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw num rados handles = 1
rgw enable usage log = false
# Without these, what was overwritten stays in memory for two hours.
rgw gc obj min wait = 1
rgw gc processor period = 3
rgw gc processor max time = 3
"""


@contextlib.contextmanager
def start_ceph(home: Path) -> Iterator[Server]:
    """Start a real Ceph: one monitor, one disk in memory, one S3 gateway."""
    with contextlib.ExitStack() as stack:
        for attempt in range(CEPH_ATTEMPTS):
            (home / str(attempt)).mkdir()
            try:
                server = stack.enter_context(_start_ceph_once(home / str(attempt)))
                break
            except RuntimeError:  # on a busy machine its processes now and then fail to find each other
                if attempt == CEPH_ATTEMPTS - 1:
                    raise
        yield server


@contextlib.contextmanager
def _start_ceph_once(home: Path) -> Iterator[Server]:
    _require_programs("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")
    _require_packages("s3fs")
    for name in ("mon", "osd0", "rgw"):
        (home / name).mkdir()
    port, mon_port, fsid, disk = free_port(), free_port(), str(uuid.uuid4()), str(uuid.uuid4())
    configuration, keyring, monmap = home / "ceph.conf", home / "keyring", home / "monmap"
    configuration.write_text(
        CEPH_CONFIGURATION.format(home=home, fsid=fsid, port=port, mon_port=mon_port, host=socket.gethostname())
    )

    def run(*command: object) -> str:
        done = subprocess.run(
            [str(word) for word in command],
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            env={**os.environ, "CEPH_CONF": str(configuration)},
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
        return done.stdout

    everything = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
    run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *everything)
    run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", monmap)
    run("ceph-mon", "-c", configuration, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)

    def ceph(*words: str) -> str:
        # A monitor that has only just begun to listen refuses for a moment.
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return run("ceph", "-c", configuration, "--connect-timeout", "30", *words)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def monitor_answers() -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", mon_port)) == 0

    def disk_is_up() -> bool:
        return "1 up" in ceph("osd", "stat")

    endpoint = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(_running(["ceph-mon", "-f", "-c", str(configuration), "-i", "a"], home, monitor_answers))
        ceph("osd", "create", disk)
        ceph("osd", "crush", "add", "osd.0", "1.0", "root=default", "host=a")
        run("ceph-osd", "-c", configuration, "-i", "0", "--mkfs", "--osd-uuid", disk)
        daemons.enter_context(_running(["ceph-osd", "-f", "-c", str(configuration), "-i", "0"], home, disk_is_up))
        gateway = ["radosgw", "-f", "-c", str(configuration), "-n", "client.rgw"]
        daemons.enter_context(_running(gateway, home, lambda: _answers(endpoint)))
        user = ["user", "create", "--uid=test", "--display-name=test"]
        keys = [f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        run("radosgw-admin", "-c", configuration, *user, *keys)
        yield Server("ceph", endpoint, "s3", s3_options(endpoint), home)


#: Starts a server of each kind.
STARTERS: Mapping[str, Callable[[Path], contextlib.AbstractContextManager[Server]]] = {
    "moto": start_moto,
    "ceph": start_ceph,
    "rclone": start_rclone,
    "azurite": start_azurite,
    "gcs": start_gcs,
}
