"""One file that plain ``torch.load`` reads, with a digest of every byte (``docs/format.md``, "torch file")."""

from ckpt_core.layouts.torch_file.image import FileImage, StateLayout
from ckpt_core.layouts.torch_file.loading import load_torch_file, peek_torch_file, verify_torch_file
from ckpt_core.layouts.torch_file.manifest import FORMAT_VERSION, Manifest

__all__ = [
    "FORMAT_VERSION",
    "FileImage",
    "Manifest",
    "StateLayout",
    "load_torch_file",
    "peek_torch_file",
    "verify_torch_file",
]
