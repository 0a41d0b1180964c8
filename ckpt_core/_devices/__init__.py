"""Accelerators: the only place that knows their streams, their pinned memory and their generators.

Everything goes through torch's interface to all of them. What decides is whether memory is the host's, never which
device it is; only pinning needs to know, because torch has no call for memory that it has not allocated. Nothing here
starts a device that the program has not started.
"""
