"""Checkpoints for libraries that have a training loop of their own on top of Accelerate, one module for each."""
