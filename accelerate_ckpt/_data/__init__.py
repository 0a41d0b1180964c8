"""Data position of prepared loaders: captured at a save, restored at a resume."""
