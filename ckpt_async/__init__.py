"""Asynchronous training: consistent cuts, a parameter server, Hogwild and DiLoCo.

:mod:`ckpt_async.consistent_cut` decides, without I/O, when each process captures its state.
:mod:`ckpt_async.parameter_server` is a small, real parameter server whose checkpoints are such cuts.
:mod:`ckpt_async.local_updates` saves trainings in which each worker runs its own optimizer steps.
"""

__all__: list[str] = []
