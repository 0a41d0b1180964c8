"""One file that plain ``torch.load`` reads, with a digest of every byte (``docs/format.md``, "torch file")."""

from ckpt_core._layouts.torch_file.image import FileImage, StateLayout
from ckpt_core._layouts.torch_file.loading import (
    glance_at_torch_file,
    load_torch_file,
    peek_torch_file,
    translated_errors,
    verify_torch_file,
)
from ckpt_core._layouts.torch_file.manifest import FORMAT_VERSION, Manifest
from ckpt_core._layouts.torch_file.opening import is_archive, read_stamp

__all__ = [
    "FORMAT_VERSION",
    "FileImage",
    "Manifest",
    "StateLayout",
    "glance_at_torch_file",
    "is_archive",
    "load_torch_file",
    "peek_torch_file",
    "read_stamp",
    "translated_errors",
    "verify_torch_file",
]
