"""Accelerators: the only package that handles their streams, their pinned memory and their generators (RNG).

It uses torch's device-independent interface: code depends on whether memory is the host's, never on the type of the
device. Only pinning depends on the type, because torch has no call to pin memory that it did not allocate. Nothing here
initializes a device that the program has not initialized.
"""
