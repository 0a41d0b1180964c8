"""Asynchronous training: consistent cuts, a parameter server, Hogwild and DiLoCo.

:mod:`ckpt_async.consistent_cut` decides, without I/O, when each process captures; :mod:`ckpt_async.parameter_server` is
a small, real parameter server to take such cuts of; :mod:`ckpt_async.local_updates` saves workers that step for
themselves.
"""

__all__: list[str] = []
