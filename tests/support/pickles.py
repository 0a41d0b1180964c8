"""Pickles that ``torch.load`` refuses by default (``weights_only=True``), and torch files that contain them."""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import defaultdict
from typing import Any

from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION


def _recursive() -> tuple[Any, ...]:
    found: tuple[Any, ...] = ([],)
    found[0].append(found)
    return found


_BEGIN = b"\x80\x02"  # protocol 2
_ONE, _TEXT = b"K\x01", b"X\x01\0\0\0a"

# No pickler writes these: bytes have changed, or are missing.
DAMAGED = {
    "no such operation": _BEGIN + b"}\xff.",
    "SETITEM of a number": _BEGIN + _ONE + _ONE + _ONE + b"s.",
    "SETITEMS of a number": _BEGIN + _ONE + b"(" + _ONE + _ONE + b"u.",
    "APPEND to a number": _BEGIN + _ONE + _ONE + b"a.",
    "APPENDS to a text": _BEGIN + _TEXT + b"(" + _ONE + b"e.",
    "BUILD of a number": _BEGIN + _ONE + b"}b.",
    "BUILD of a dictionary": _BEGIN + b"}}b.",
    "REDUCE of a number": _BEGIN + _ONE + b")R.",
    "REDUCE of a text": _BEGIN + _TEXT + b")R.",
    "NEWOBJ of a number": _BEGIN + _ONE + b")\x81.",
    "persistent id that is a text": _BEGIN + _TEXT + b"Q.",
    "persistent id of no storage": _BEGIN + _TEXT + b"\x85Q.",
    "a memo that there is not": _BEGIN + b"}h\x09.",
    "an empty stack": _BEGIN + b"\x85.",
    "a text that is not UTF-8": _BEGIN + b"X\x01\0\0\0\xff.",
    "text": b"garbage" * 100,
    "no end": _BEGIN + b"}",
}
# A pickler has written these, and reading some of them runs code.
REFUSED = {
    "a function": _BEGIN + b"cposixpath\njoin\n" + _TEXT + b"\x85R.",
    "a function of a blocked module": _BEGIN + b"cposix\ngetpid\n)R.",
    "a type": _BEGIN + b"cpathlib\nPurePosixPath\n)R.",
    "a number that is too long": pickle.dumps({"a": 1 << 5000}, 2),
    "a tuple that holds itself": pickle.dumps(_recursive(), 2),
    "protocol 3": pickle.dumps({"a": b"x"}, 3),
    "protocol 5": pickle.dumps({"a": 1}, 5),
}
# These are refused even if the program has allowed the types.
REFUSED_THOUGH_ALLOWED = {
    "elements of another dictionary": (pickle.dumps(defaultdict(list, {1: [2]}), 2), [defaultdict, list]),
}


def archive_of(pickled: bytes) -> bytes:
    """Return the file that ``torch.save`` would make of a pickle without tensors."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", sys.byteorder)
    return file.getvalue()


def old_file_of(pickled: bytes) -> bytes:
    """Return the file that ``torch.save`` of torch before 1.6 would make of a pickle without tensors."""
    machine = {"protocol_version": PROTOCOL_VERSION, "little_endian": sys.byteorder == "little", "type_sizes": {}}
    before = [pickle.dumps(value, 2) for value in (MAGIC_NUMBER, PROTOCOL_VERSION, machine)]
    return b"".join([*before, pickled, pickle.dumps([], 2)])
