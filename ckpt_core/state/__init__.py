"""Capture and restore the parts of a training state that frameworks forget.

``rng``: random generators. ``gradients``: the open accumulation window. ``samplers``, ``loaders``: where the data is,
without reading it again; ``worker_generators``: those of its workers. ``kinds``: which rank owns what.
"""
