"""Exact resume: what a fit knows besides what Lightning saves, captured and restored."""
