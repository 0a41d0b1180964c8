"""Capture and restore the parts of a training state that frameworks forget.

``rng``: random generators. ``gradients``: the open accumulation window. ``samplers``, ``workers``, ``loaders``: where
the data is, without reading it again. ``kinds``: which rank owns what.
"""
