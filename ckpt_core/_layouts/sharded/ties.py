"""Which tensors are tied: the same part of the same memory, so that one copy of the bytes is enough.

torch's private ``UntypedStorage._cdata`` is used here: the identity of a storage, which also storages without bytes have.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

__all__ = ["identity_of"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def identity_of(tensor: torch.Tensor) -> Hashable:
    """Return a value that two tensors share only if they are tied.

    All ranks come to the same conclusion about tensors of which they hold different pieces, or none: what decides is never
    an address. Of kinds of tensors that are not known here, only the very same object is tied to itself.
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested:
        try:
            return _memory(tensor)
        except NotImplementedError:  # of torch.func: it has no memory
            return id(tensor)
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return id(tensor)
    with torch.no_grad():
        local = tensor.to_local()  # type: ignore[attr-defined] # a DTensor: importing the class would cost a second
    if type(local) is not torch.Tensor or local.layout is not torch.strided:
        return id(tensor)
    return (_memory(local), tuple(tensor.shape), placements, tensor.device_mesh)  # type: ignore[attr-defined]


def _memory(tensor: torch.Tensor) -> Hashable:
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
