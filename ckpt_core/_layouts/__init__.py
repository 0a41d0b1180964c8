"""Bytes on disk: how a state is laid out in a file or a directory."""
