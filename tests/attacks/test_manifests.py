"""Files with right digests but false content: each is refused, quickly and in little memory."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, CheckpointError, verify
from ckpt_core._layouts.torch_file.manifest import FOOTER_SIZE, MANIFEST_NAME, Footer, pieces
from ckpt_core._layouts.torch_file.zip_format import ZipRecord, local_header
from ckpt_core.digest import digest, digest_of_parts
from tests.conftest import ScriptRunner
from tests.support.archives import central_directory

Document = dict[str, Any]


class Forger:
    """Takes one of our checkpoints apart and rebuilds it with a changed manifest and right digests."""

    def __init__(self, path: Path) -> None:
        with Checkpointer(strategy="sync") as checkpointer:
            checkpointer.save({"w": torch.arange(100.0), "v": torch.ones(7), "x": [1, 2]}, path)
        self.path = path
        self.content = path.read_bytes()
        footer = Footer.decode(self.content[-FOOTER_SIZE:], path=str(path))
        assert footer is not None
        self.body = self.content[: footer.tail_offset]
        with zipfile.ZipFile(path) as archive:
            self.manifest: Document = json.loads(archive.read(MANIFEST_NAME))
            self.entries = [
                ZipRecord(info.filename, info.header_offset, 0, info.file_size, info.CRC)
                for info in archive.infolist()
                if info.filename != MANIFEST_NAME
            ]

    def write(self, manifest: bytes, body: bytes | None = None, entries: list[ZipRecord] | None = None) -> None:
        body = self.body if body is None else body
        record, header = local_header(MANIFEST_NAME, len(body), len(manifest), alignment=64, crc=zlib.crc32(manifest))
        closing = header + manifest
        comment = Footer(len(body), "0" * 16).encode()
        entries = [*(self.entries if entries is None else entries), record]
        closing += central_directory(entries, len(body) + len(closing), comment)[: -len(comment)]
        self.path.write_bytes(body + closing + Footer(len(body), digest(closing)).encode())

    def write_document(self, document: Any) -> None:
        self.write(json.dumps(document).encode())


@pytest.fixture
def forger(tmp_path: Path) -> Forger:
    return Forger(tmp_path / "a.ckpt")


def assert_refused(path: Path) -> None:
    for action in (verify, Checkpointer(strategy="sync").load):
        with pytest.raises(CheckpointError) as caught:
            action(path)
        assert str(path) in str(caught.value)


def test_the_forger_itself_is_believed(forger: Forger) -> None:
    forger.write_document(forger.manifest)
    assert verify(forger.path)
    assert forger.path.read_bytes() != b""
    assert torch.equal(Checkpointer(strategy="sync").load(forger.path)["w"], torch.arange(100.0))


def record(index: int, field: int, value: Any) -> Callable[[Document], None]:
    def change(manifest: Document) -> None:
        manifest["records"][index][field] = value

    return change


def field(name: str, value: Any) -> Callable[[Document], None]:
    return lambda manifest: manifest.update({name: value})


def swap_records(manifest: Document) -> None:
    manifest["records"][0], manifest["records"][1] = manifest["records"][1], manifest["records"][0]


def duplicate_record(manifest: Document) -> None:
    manifest["records"].insert(1, manifest["records"][0])


def empty_duplicate(manifest: Document) -> None:
    name, offset, size, _ = manifest["records"][0]
    manifest["records"].insert(1, [name, offset + size, 0, []])


def overlapping(manifest: Document) -> None:
    _, offset, size, _ = manifest["records"][0]
    manifest["records"][1][1] = offset + size - 8


def swap_storages(manifest: Document) -> None:
    manifest["storages"].reverse()


def too_few_storages(manifest: Document) -> None:
    manifest["storages"].pop()


def storage_twice(manifest: Document) -> None:
    manifest["storages"][1] = manifest["storages"][0]


def pickle_as_storage(manifest: Document) -> None:
    manifest["storages"][0] = "archive/data.pkl"


def no_pickle(manifest: Document) -> None:
    manifest["records"] = [entry for entry in manifest["records"] if entry[0] != "archive/data.pkl"]


def extra_digest(manifest: Document) -> None:
    manifest["records"][0][3].append("0" * 16)


def no_digests(manifest: Document) -> None:
    for entry in manifest["records"]:
        entry[3] = []


CHANGES: dict[str, Callable[[Document], None]] = {
    "negative offset": record(0, 1, -64),
    "offset of 2^63": record(0, 1, 2**63),
    "offset of 2^64": record(1, 1, 2**64 + 64),
    "offset of 10^400": record(1, 1, 10**400),
    "negative size": record(0, 2, -1),
    "huge size": record(0, 2, 2**62),
    "size of 10^4000": record(0, 2, 10**4000),
    "size a float": record(0, 2, 400.0),
    "size a bool": record(0, 2, True),
    "size a text": record(0, 2, "400"),
    "offset null": record(0, 1, None),
    "name a number": record(0, 0, 7),
    "name a list": record(0, 0, ["x"]),
    "digests a text": record(0, 3, "0"),
    "digests a number": record(0, 3, 5),
    "digest a number": record(0, 3, [5]),
    "digest wrong": record(0, 3, ["0" * 16]),
    "digests missing": record(0, 3, []),
    "record too short": lambda manifest: manifest["records"][0].pop(),
    "record a number": lambda manifest: manifest["records"].append(3),
    "records swapped": swap_records,
    "record twice": duplicate_record,
    "empty record of the same name": empty_duplicate,
    "records overlap": overlapping,
    "extra digest": extra_digest,
    "no digests at all": no_digests,
    "no pickle": no_pickle,
    "storages swapped": swap_storages,
    "too few storages": too_few_storages,
    "a storage twice": storage_twice,
    "the pickle as a storage": pickle_as_storage,
    "storages a text": field("storages", "archive/data/0"),
    "storages a number": field("storages", 3),
    "storages unhashable": field("storages", [[1]]),
    "storages unknown": field("storages", ["archive/data/99", "archive/data/1"]),
    "records a number": field("records", 3),
    "records a text": field("records", "abcd"),
    "records a dict": field("records", {"abcd": 1}),
    "no records": field("records", []),
    "another window": field("window", 1),
    "another version": field("version", 2),
    "version a list": field("version", [1]),
    "another format": field("format", "something"),
    "unknown digest": field("digest", "md5000"),
    "digest a list": field("digest", ["xxh3_64"]),
    "wrong structure": field("structure", "0" * 16),
    "structure null": field("structure", None),
    "no structure": lambda manifest: manifest.pop("structure"),
    "no storages": lambda manifest: manifest.pop("storages"),
}
# ``verify`` reads only bytes, so it cannot know in which order the pickle refers to the storages.
FOUND_BY_LOADING_ONLY = {"storages swapped", "too few storages", "a storage twice"}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_lies_is_refused(name: str, forger: Forger) -> None:
    CHANGES[name](forger.manifest)
    forger.write_document(forger.manifest)
    if name in FOUND_BY_LOADING_ONLY:
        with pytest.raises(CheckpointError):
            Checkpointer(strategy="sync").load(forger.path)
    else:
        assert_refused(forger.path)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"1" * 100_000,
        b'{"records": NaN}',
        b'"\\ud800"',
    ],
    ids=lambda manifest: repr(manifest[:12]),
)
def test_a_manifest_that_is_none_is_refused(manifest: bytes, forger: Forger) -> None:
    forger.write(manifest)
    assert_refused(forger.path)


@pytest.mark.parametrize("offset", [0, 1, 30, 63, -1, 2**40, 2**63, 2**64 - 1])
def test_a_footer_that_points_elsewhere_is_refused(offset: int, forger: Forger) -> None:
    end = Footer(offset % 2**64 if offset != -1 else len(forger.content) - 1, "0" * 16)
    tail = forger.content[end.tail_offset : -FOOTER_SIZE] if end.tail_offset < len(forger.content) else b""
    forger.path.write_bytes(forger.content[:-FOOTER_SIZE] + Footer(end.tail_offset, digest(tail)).encode())
    assert_refused(forger.path)


def forge_pickle(forger: Forger, data: bytes, *, compressed: bytes | None = None) -> None:
    """Replace the pickle; with ``compressed``, by a record that unpacks to ``data``."""
    stored = data if compressed is None else compressed
    records, entries, body, gaps = [], [], b"", []
    for name, offset, size, _ in forger.manifest["records"]:
        content = stored if name == "archive/data.pkl" else forger.content[offset : offset + size]
        entry, header = local_header(name, len(body), len(content), alignment=64)
        if name == "archive/data.pkl" and compressed is not None:
            header = header[:8] + struct.pack("<H", zipfile.ZIP_DEFLATED) + header[10:22]
            header += struct.pack("<I", len(data)) + local_header(name, len(body), len(content), alignment=64)[1][26:]
        gaps.append(header)
        body += header + content
        found = [digest(content[b - entry.offset : e - entry.offset]) for b, e in pieces(entry.offset, entry.size)]
        records.append([name, entry.offset, entry.size, found])
        entries.append(entry)
    forger.manifest["records"] = records
    forger.manifest["structure"] = digest_of_parts(gaps)
    forger.write(json.dumps(forger.manifest).encode(), body, entries)
    if compressed is not None:
        content = bytearray(forger.path.read_bytes())
        begin = content.rindex(b"archive/data.pkl", 0, content.rindex(MANIFEST_NAME.encode()))
        central = begin - 46
        assert content[central : central + 4] == b"PK\1\2"
        content[central + 10 : central + 12] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        content[central + 24 : central + 28] = struct.pack("<I", len(data))
        content[central + 16 : central + 20] = struct.pack("<I", zlib.crc32(data))
        tail = content[len(body) : -FOOTER_SIZE]
        forger.path.write_bytes(bytes(content[:-FOOTER_SIZE]) + Footer(len(body), digest(tail)).encode())


def test_a_pickle_and_a_manifest_that_disagree_are_refused(forger: Forger) -> None:
    with zipfile.ZipFile(forger.path) as archive:
        good = archive.read("archive/data.pkl")
    forge_pickle(forger, good)
    assert verify(forger.path)
    assert torch.equal(Checkpointer(strategy="sync").load(forger.path)["v"], torch.ones(7))
    assert good.count(b"Kd") >= 1
    forge_pickle(forger, good.replace(b"Kd", b"Ke"))  # 101 elements over 100
    with pytest.raises(CheckpointError):
        Checkpointer(strategy="sync").load(forger.path)


LIMITED = """
import resource, sys
import torch
from ckpt_core import Checkpointer, CheckpointError, verify

torch.zeros(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 150 * 2**20,) * 2)
for path in sys.argv[1:]:
    for name, action in (("load", Checkpointer(strategy="sync").load), ("verify", verify)):
        try:
            found = action(path)
        except CheckpointError as error:
            result = type(error).__name__
        except BaseException as error:
            result = "!" + type(error).__name__ + " " + str(error)[:200]
        else:
            result = "returned " + type(found).__name__
        print(path.rpartition("/")[2], name, result)
"""


@pytest.mark.extended
def test_bombs_fill_no_memory(run_script: ScriptRunner, tmp_path: Path) -> None:
    bomb = pickle.dumps([b"\0" * 1000], 2)[:-1] + b"0N." + b"\0" * (300 * 2**20)
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    packed = packer.compress(bomb) + packer.flush()
    assert len(packed) < 4 * 2**20

    forger = Forger(tmp_path / "ours.ckpt")
    forge_pickle(forger, bomb, compressed=packed)
    with zipfile.ZipFile(forger.path) as archive:
        assert archive.getinfo("archive/data.pkl").file_size == len(bomb)
        assert archive.open("archive/data.pkl").read(10) == bomb[:10]

    with zipfile.ZipFile(tmp_path / "stock.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", bomb, zipfile.ZIP_DEFLATED)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    del bomb

    # Many names for one record.
    entry, header = local_header("a/data.pkl", 0, 1000, alignment=64)
    entries = [entry, *(ZipRecord(f"a/data/{i}", 0, entry.offset, 1000) for i in range(10_000))]
    (tmp_path / "overlap.ckpt").write_bytes(header + bytes(1000) + central_directory(entries, len(header) + 1000, b""))

    # A sparse file that claims a gap of many gigabytes.
    forger = Forger(tmp_path / "sparse.ckpt")
    hole = 2**36
    with forger.path.open("r+b") as file:
        tail = forger.content[len(forger.body) : -FOOTER_SIZE]
        manifest = json.dumps(forger.manifest).encode()
        record, header = local_header(MANIFEST_NAME, hole, len(manifest), alignment=64)
        tail = header + manifest
        comment = Footer(hole, "0" * 16).encode()
        tail += central_directory([*forger.entries, record], hole + len(tail), comment)[: -len(comment)]
        file.truncate(len(forger.body))
        file.seek(hole)
        file.write(tail + Footer(hole, digest(tail)).encode())

    # A footer that claims a whole huge file as its tail.
    forger = Forger(tmp_path / "tail.ckpt")
    with forger.path.open("r+b") as file:
        file.truncate(2**36)
        file.seek(2**36)
        file.write(Footer(0, "0" * 16).encode())

    names = ["ours", "stock", "overlap", "sparse", "tail"]
    done = run_script(LIMITED, *(tmp_path / f"{name}.ckpt" for name in names))
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert [(name, action) for name, action, _ in lines] == [
        (f"{name}.ckpt", action) for name in names for action in ("load", "verify")
    ]
    for name, action, result in lines:
        assert result in ("CheckpointFormatError", "CheckpointCorruptedError"), (name, action, result)
