"""Directories of safetensors files with one manifest, for any number of ranks (``docs/format_sharded.md``)."""

from ckpt_core._layouts.safetensors import TensorInfo
from ckpt_core._layouts.sharded.files import describe_file
from ckpt_core._layouts.sharded.manifest import FORMAT_VERSION, MANIFEST_NAME, ExtraFile
from ckpt_core._layouts.sharded.matching import LocalView
from ckpt_core._layouts.sharded.plain import decode_plain, encode_plain
from ckpt_core._layouts.sharded.reading import DirectoryCheckpoint, PartInfo
from ckpt_core._layouts.sharded.writing import PartContent, RankFiles, build_manifest

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "DirectoryCheckpoint",
    "ExtraFile",
    "LocalView",
    "PartContent",
    "PartInfo",
    "RankFiles",
    "TensorInfo",
    "build_manifest",
    "decode_plain",
    "describe_file",
    "encode_plain",
]
