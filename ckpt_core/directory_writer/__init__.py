"""The save of a checkpoint that is a directory, as one rank sees it.

``planning``: which part of the state this rank writes. ``sources``: that part, live or copied to memory of ours. ``added_files``: what
callers add. ``rank_save``: written, reported, committed, cleaned up. ``copying``: one checkpoint to another
path. ``previous``: what is there before. ``cleaning``: what is left.
"""
