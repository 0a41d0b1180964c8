"""How the ranks of a distributed save agree on its outcome without a collective: commit on rank 0, or failure on all.

``rank_group``: the ranks of a run. ``announcement``: how rank 0 publishes an outcome; used by the modules below.
``save_outcome``: one save, from the reports of all ranks to the commit. ``background_failures``: raises the failure of
a background save on all ranks at the same step. ``raising_together``: raises on all ranks what failed on one.
``agreement``: passes a value from rank 0 to all ranks, with an error if a rank is missing; ``absent_ranks`` finds the
ranks that will not come, ``endings`` those that were signalled to end. ``acting_together``: all ranks act on a signal
at the same step. ``tcp_store``: the store through which ranks communicate.
"""
