"""The bytes on disk: how a state is laid out in one torch file or in a directory of safetensors files."""
