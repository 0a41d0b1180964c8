"""Facilities of the process: threads, signals, console output, exit, process groups, and paths that are being saved."""
