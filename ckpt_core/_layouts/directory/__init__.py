"""The directory layout: safetensors files and one manifest, for any number of ranks (``docs/format_sharded.md``)."""
