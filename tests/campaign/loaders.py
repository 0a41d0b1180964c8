"""Loaders of the campaign that both frameworks train with."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Subset, WeightedRandomSampler, random_split

from tests.campaign.data import (
    BucketBatches,
    Growing,
    InPlaceSampler,
    Items,
    Jitter,
    Mining,
    OwnNoise,
    StatefulStream,
    Stream,
    Stuck,
    collate_with,
)


def mapped(make: Callable[[], Any] = Items, **settings: Any) -> Callable[[], Any]:
    return lambda: DataLoader(make(), **{"batch_size": 8, "shuffle": True, **settings})


def _made(make: Callable[[], dict[str, Any]]) -> Callable[[], Any]:
    return lambda: DataLoader(**{"dataset": Items(), **make()})


def streamed(kind: str, make: Any = Stream, **settings: Any) -> Callable[[], Any]:
    return lambda: DataLoader(make(kind), batch_size=8, **settings)


def _stateful(make: Callable[[], Any] = Items, **settings: Any) -> Callable[[], Any]:
    def loader() -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(make(), batch_size=8, **settings)

    return loader


def _nodes(kind: str) -> Callable[[], Any]:
    def loader() -> Any:
        from torch.utils.data import RandomSampler
        from torchdata import nodes

        # without noise: a thread would draw it at an unpredictable time
        items = Items() if kind != "prefetch" else Items(draw=lambda: torch.zeros(8))
        generator = torch.Generator().manual_seed(3) if kind == "generator" else None
        sampler = RandomSampler(items, generator=generator)  # type: ignore[arg-type]
        node: Any = nodes.SamplerWrapper(sampler)
        node = nodes.Mapper(node, items.__getitem__)
        node = nodes.Mapper(nodes.Batcher(node, 8), torch.utils.data.default_collate)
        if kind == "prefetch":
            node = nodes.Prefetcher(node, 2)
        return nodes.Loader(node)

    return loader


def hugging_face(kind: str, stateful: bool = False, **settings: Any) -> Callable[[], Any]:
    def loader() -> Any:
        import datasets
        import pyarrow
        from datasets.table import InMemoryTable

        datasets.disable_progress_bars()
        items = Items(draw=lambda: torch.zeros(8))
        table = InMemoryTable(pyarrow.table({"x": items.x.tolist(), "y": items.y.tolist()}))
        data: Any = datasets.Dataset(table, fingerprint="campaign")
        data.set_format("torch")
        if kind == "map":
            return DataLoader(data, batch_size=8, shuffle=True, **settings)
        if kind == "transform":
            jitter = Jitter()
            data.set_transform(lambda rows: {**rows, "x": [jitter(torch.tensor(x)) for x in rows["x"]]})
            return DataLoader(data, batch_size=8, shuffle=True, **settings)
        data = data.to_iterable_dataset(num_shards=4)
        if "shuffled" in kind:
            data = data.shuffle(seed=3, buffer_size=12)
        if stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(data, batch_size=8, **settings)
        return DataLoader(data, batch_size=8, **settings)

    return loader


def _shards() -> str:
    import tempfile

    import webdataset

    directory, items = tempfile.mkdtemp(prefix="campaign-shards-"), Items()
    for shard in range(4):
        with webdataset.TarWriter(f"{directory}/{shard}.tar") as tar:
            for i in range(shard * 12, shard * 12 + 12):
                tar.write({"__key__": f"{i:04d}", "x.pth": items.x[i], "cls": int(items.y[i])})
    return directory


def _webdataset(workers: int = 0, **settings: Any) -> Callable[[], Any]:
    def loader() -> Any:
        import webdataset

        data: Any = webdataset.WebDataset(_shards() + "/{0..3}.tar", **settings)
        if settings.get("shardshuffle"):
            data = data.compose(webdataset.detshuffle(12, seed=3))
        data = data.decode().to_tuple("x.pth", "cls").batched(8)
        return DataLoader(data, batch_size=None, num_workers=workers)

    return loader


def _litdata(streaming: bool) -> Callable[[], Any]:
    def loader() -> Any:
        import os
        import tempfile

        import litdata
        from litdata.streaming.writer import BinaryWriter

        # the campaign forks all processes of a case, and litdata resumes only in the same directory
        directory, items = f"{tempfile.gettempdir()}/campaign-lit-{os.getppid()}", Items()
        if not os.path.exists(directory):
            writer = BinaryWriter(cache_dir=directory, chunk_size=12)
            for i in range(48):
                writer[i] = {"x": items.x[i], "y": int(items.y[i])}
            writer.done()
            writer.merge()
        data = litdata.StreamingDataset(input_dir=directory, shuffle=True, seed=3)
        if streaming:
            return litdata.StreamingDataLoader(data, batch_size=8)
        return DataLoader(data, batch_size=8)

    return loader


def _mosaic(stateful: bool) -> Callable[[], Any]:
    def loader() -> Any:
        import tempfile

        import streaming

        streaming.base.util.clean_stale_shared_memory()
        directory = tempfile.mkdtemp(prefix="campaign-mds-")
        items = Items()
        with streaming.MDSWriter(out=directory, columns={"x": "ndarray:float32", "y": "int"}) as writer:
            for i in range(48):
                writer.write({"x": items.x[i].numpy(), "y": int(items.y[i])})
        data = streaming.StreamingDataset(local=directory, shuffle=True, shuffle_seed=3, batch_size=8)
        made = streaming.StreamingDataLoader if stateful else DataLoader
        return made(data, batch_size=8)

    return loader


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": mapped(),
    "in order": mapped(shuffle=False),
    "own generator": _made(
        lambda: {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(2)},
    ),
    "drop_last": mapped(functools.partial(Items, 50), drop_last=True),
    "ragged last batch": mapped(functools.partial(Items, 45)),
    "weighted": _made(lambda: {"batch_size": 8, "sampler": WeightedRandomSampler(torch.arange(1.0, 49), 48)}),
    "subset": mapped(lambda: Subset(Items(64), range(8, 56))),
    "random_split": mapped(lambda: random_split(Items(64), [48, 16])[0]),
    "two workers": mapped(num_workers=2),
    "two workers, numpy noise": mapped(lambda: Items(draw=OwnNoise("global numpy")), num_workers=2),
    "two workers, own noise": mapped(lambda: Items(draw=OwnNoise("torch")), num_workers=2),
    "persistent workers": mapped(num_workers=2, persistent_workers=True),
    "persistent workers, own noise": mapped(
        lambda: Items(draw=OwnNoise("numpy")), num_workers=2, persistent_workers=True
    ),
    "two workers, prefetch_factor": mapped(num_workers=2, prefetch_factor=4),
    **{f"{kind} noise of its own": mapped(lambda kind=kind: Items(draw=OwnNoise(kind))) for kind in OwnNoise.kinds},
    "two workers, counted noise": mapped(lambda: Items(draw=OwnNoise("counts")), num_workers=2),
    "two workers, noise that flips": mapped(lambda: Items(54, OwnNoise("flips")), batch_size=9, num_workers=2),
    "concatenated": mapped(
        lambda: ConcatDataset([Items(24, OwnNoise("torch")), Items(24, OwnNoise("numpy"))]), shuffle=False
    ),
    "collate_fn with a generator": lambda: DataLoader(
        Items(), batch_size=8, collate_fn=collate_with(torch.Generator().manual_seed(4))
    ),
    "collate_fn, two workers": lambda: DataLoader(
        Items(), batch_size=8, num_workers=2, collate_fn=collate_with(torch.Generator().manual_seed(4))
    ),
    "collate_fn, global": mapped(collate_fn=collate_with(None)),
    **{
        f"sampler shuffles its {kind}, batch {batch}": _made(
            lambda kind=kind, batch=batch: {
                "sampler" if batch is None else "batch_sampler": InPlaceSampler(48, batch, kind),
                **({"batch_size": 8} if batch is None else {}),
            }
        )
        for kind, batch in itertools.product(("list", "array", "tensor"), (None, 8))
    },
    "sampler shuffles its list, two workers": _made(
        lambda: {"batch_sampler": InPlaceSampler(48, 8), "num_workers": 2},
    ),
    **{
        f"buckets, {kind}": _made(lambda kind=kind: {"batch_sampler": BucketBatches(kind)})
        for kind in ("epoch", "generator", "shared", "queue")
    },
    "buckets, queue, two workers": _made(lambda: {"batch_sampler": BucketBatches("queue"), "num_workers": 2}),
    "hard mining": _made(lambda: {"sampler": Mining(), "batch_size": 8}),
    "hard mining, two workers": _made(lambda: {"sampler": Mining(), "batch_size": 8, "num_workers": 2}),
    **{
        f"data set that changes: {kind}": mapped(lambda kind=kind: Growing(kind))
        for kind in ("order", "reads", "drawn")
    },
    "data set that changes, two workers": mapped(lambda: Growing("reads"), num_workers=2),
    **{f"stream {kind}": streamed(kind) for kind in ("plain", "counts", "global", "clock", "own", "noise", "cursor")},
    **{
        f"stream {kind}, two workers": streamed(kind, num_workers=2)
        for kind in ("plain", "counts", "global", "own", "noise")
    },
    "stream counts, persistent workers": streamed("counts", num_workers=2, persistent_workers=True),
    "stream with a state": streamed("counts", StatefulStream),
    "chained streams": lambda: DataLoader(ChainDataset([Stream("own", 24), Stream("global", 24)]), batch_size=8),
    "list of loaders": lambda: [mapped()(), mapped(batch_size=16)()],
    "an own loader": lambda: _Generates(),  # noqa: PLW0108 - it is defined below
    "stateful loader": _stateful(shuffle=True),
    "stateful loader, two workers": _stateful(shuffle=True, num_workers=2),
    "stateful loader, stream": _stateful(lambda: StatefulStream("counts")),
    "stateful loader, stuck stream": _stateful(Stuck),
    "stateful loader, plain stream": _stateful(lambda: Stream("counts")),
    "dictionary": lambda: {"a": mapped()(), "b": mapped(batch_size=16)()},
    "nodes": _nodes("global"),
    "nodes, generator": _nodes("generator"),
    "nodes, prefetch": _nodes("prefetch"),
}


def _batches() -> list[Any]:
    items = Items(draw=lambda: torch.zeros(8))
    return [torch.utils.data.default_collate([items[j] for j in range(i, i + 8)]) for i in range(0, 48, 8)]


class _Generates:
    """A loader that is not a ``DataLoader`` and shuffles its batches with the global generator."""

    def __init__(self) -> None:
        self.batches = _batches()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        random.shuffle(self.batches)
        yield from self.batches


NEEDS = {
    "hf map": (hugging_face("map"), "datasets"),
    "hf map, two workers": (hugging_face("map", num_workers=2), "datasets"),
    "hf map with a transform": (hugging_face("transform"), "datasets"),
    "hf iterable": (hugging_face("iterable"), "datasets"),
    "hf iterable, shuffled": (hugging_face("iterable, shuffled"), "datasets"),
    "hf iterable, shuffled, two workers": (hugging_face("iterable, shuffled", num_workers=2), "datasets"),
    "hf iterable, stateful loader": (hugging_face("iterable", stateful=True), "datasets"),
    "hf iterable, stateful loader, shuffled": (hugging_face("iterable, shuffled", stateful=True), "datasets"),
    "webdataset": (_webdataset(shardshuffle=False), "webdataset"),
    "webdataset, shuffled": (_webdataset(shardshuffle=4, seed=1), "webdataset"),
    "webdataset, shuffled, worker": (_webdataset(1, shardshuffle=4, seed=1), "webdataset"),
    "litdata": (_litdata(streaming=False), "litdata"),
    "litdata, streaming loader": (_litdata(streaming=True), "litdata"),
    "mosaicml": (_mosaic(stateful=False), "streaming"),
    "mosaicml, streaming loader": (_mosaic(stateful=True), "streaming"),
}
