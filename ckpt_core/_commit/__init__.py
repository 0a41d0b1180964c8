"""How ranks come to one outcome of a save without a collective.

``rank_group``: the ranks. ``announcement``: how they hear of an outcome, in all that follows. ``save_outcome``: one
save, from the reports of all ranks to the outcome. ``background_failures``: when training learns of one that failed.
``raising_together``: a failure that one rank knows of, raised on all at the same step. ``agreement``: what rank 0 says,
heard on all ranks, with an error where one does not come; ``absent_ranks`` knows who will not, and ``endings`` who was
told to end. ``acting_together``: what one rank is asked for, done by all at the same step. ``tcp_store``: what they
talk through.
"""
