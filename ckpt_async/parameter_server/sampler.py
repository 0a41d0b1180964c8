"""Which samples come next, for a ``DataLoader`` that may be ahead of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.utils.data import Sampler

from ckpt_async.consistent_cut import UpdateId
from ckpt_async.parameter_server.client import ParameterClient

__all__ = ["UpdateSampler"]


class UpdateSampler(Sampler[list[int]]):
    """Gives a worker's loader the batches of its streams, from where the worker stands.

    Batches that were fetched and not yet pushed do not count, so loaders may prefetch.

    Args:
        client: The worker's connection.
        samples_of: Indices of the samples of a batch: a function of its stream and number alone.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> def loader_of(client, dataset, samples_of):
        ...     return DataLoader(dataset, batch_sampler=UpdateSampler(client, samples_of), num_workers=2)
    """

    def __init__(self, client: ParameterClient, samples_of: Callable[[UpdateId], list[int]]) -> None:
        self._client = client
        self._samples_of = samples_of

    def __iter__(self) -> Iterator[list[int]]:
        return (self._samples_of(update) for update in self._client.plan())
