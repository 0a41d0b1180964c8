"""Directories of safetensors files with one manifest, for any number of ranks (``docs/format_sharded.md``)."""
