"""Capture and restore the parts of a training state that frameworks do not save.

``rng``: random generators. ``gradients``: the open accumulation window. ``samplers``, ``loaders``: the position in the
data, without reading it again; ``worker_generators``: generators in workers. ``kinds``: which rank holds what.
"""
