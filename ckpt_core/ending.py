"""Where :class:`~ckpt_core.preemption.EndWatch` was at first: programs that import it from here continue to work."""

from ckpt_core.preemption import End, EndWatch

__all__ = ["End", "EndWatch"]
