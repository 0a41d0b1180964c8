"""Nested state as JSON: types are restored exactly, ties are kept, and everything else is refused by name."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import math
import pickle
import sys
import threading
import zoneinfo
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core import SerializationError
from ckpt_core._layouts.directory.skeleton import decode_plain, decode_structure, encode_plain
from tests.support.states import assert_same_state, states


def round_trip(tree: Any) -> Any:
    skeleton, tensors = encode_plain(tree, key="state")
    text = json.dumps(skeleton, allow_nan=False)
    text.encode("ascii")
    return decode_plain(json.loads(text), [tensor for _, tensor in tensors])


@settings(max_examples=200, deadline=None)
@given(states())
def test_any_state_comes_back(state: dict[Any, Any]) -> None:
    assert_same_state(round_trip(state), state)


VALUES = [
    *(None, True, False, 0, -1, 2**63, -(2**63), 2**200, -(2**200)),
    *(0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan),
    *(1 + 2j, complex(math.nan, -math.inf), complex(-0.0, 0.0)),
    *("", "$", "$0", "$$", "$tuple", "\x00", "ä\ud800", "a.b"),
    *(b"", b"\x00\xff", bytearray(b"ab")),
    *((), (1,), [], [[]], {}, {"$dict": 1}, {"$": 1}, {"": 1}, {1: "a", "1": "b"}, {(1, "a"): [2]}, {None: 0, 1.5: 1}),
    *(set(), {1, "a"}, frozenset({(1, 2)}), {frozenset({1}): 2}),
    *(range(3), range(5, 1, -2), torch.float32, torch.float8_e4m3fn, torch.Size([2, 3]), torch.device("cuda", 1)),
    *(collections.OrderedDict(b=1, a=2), collections.Counter("aab"), collections.defaultdict(list, a=[1])),
    *(collections.defaultdict(None, {1: 2}), collections.defaultdict(int)),
    *(collections.deque([1, (2,)], maxlen=3), collections.deque(), slice(1, None, -2), slice(None)),
    *(datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)),
    *(datetime.date(2026, 1, 2), datetime.time(3, 4), datetime.timedelta(-1, 2, 3)),
    *(PurePosixPath("a/ä"), PureWindowsPath("c:\\a"), Path("/b")),
    *(np.float64(0.1), np.int8(-3), np.bool_(True), np.datetime64("2026-01-02"), np.float32("nan")),
    *(np.str_(""), np.str_("ä\ud800"), np.str_("a\0"), np.bytes_(b""), np.bytes_(b"a\0"), np.void(b"ab\0")),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    back = round_trip({"x": [value]})["x"][0]
    assert type(back) is type(value)
    assert repr(back) == repr(value)
    if isinstance(value, collections.defaultdict):
        assert back.default_factory is value.default_factory


def test_texts_of_numpy_keep_zeros_at_their_end() -> None:
    back = round_trip({"text": np.str_("a\0"), "bytes": np.bytes_(b"a\0")})
    assert (len(back["text"]), len(back["bytes"])) == (2, 2)
    assert (back["text"], back["bytes"]) == ("a\0", b"a\0")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["ab", "c"]),
        np.array(3.5),
        np.zeros((0, 4), dtype=np.int16),
        np.arange(10, dtype=np.uint64)[::3],
        np.array([True, False]),
        np.array(["2026-01-02"], dtype="datetime64[D]"),
        np.zeros(3, dtype=[("a", "V0")])["a"],
        np.zeros((0, 2**40), dtype=np.int8),
    ],
    ids=str,
)
def test_an_array_comes_back(array: np.ndarray[Any, Any]) -> None:
    array.flags.writeable = False
    back = round_trip({"a": array})["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_the_states_of_random_generators_come_back() -> None:
    import random

    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    back = round_trip(state)
    expected = random.random(), np.random.rand()
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    assert (random.random(), np.random.rand()) == expected
    assert torch.equal(back["torch"], state["torch"])


def test_the_order_of_keys_is_kept() -> None:
    assert list(round_trip({"b": 1, "a": 2, "c": {3: 1, 1: 2}})["c"]) == [3, 1]
    assert list(round_trip({"b": 1, "a": 2})) == ["b", "a"]


def test_tied_tensors_are_one_tensor_again_and_others_are_not() -> None:
    weight = torch.randn(4, 3)
    tree = {
        "embed": weight,
        "head": weight.detach(),
        "parameter": torch.nn.Parameter(weight),
        "view": weight[1:],
        "transposed": weight.t(),
        "copy": weight.clone(),
        "bits": weight.view(torch.int32),
    }
    skeleton, tensors = encode_plain(tree, key="model")
    assert [name for name, _ in tensors] == ["embed", "view", "transposed", "copy", "bits"]
    back = decode_plain(skeleton, [tensor for _, tensor in tensors])
    assert back["embed"] is back["head"] is back["parameter"]
    assert back["copy"] is not back["embed"]


def test_conjugates_and_empty_tensors_are_not_tied_to_others() -> None:
    number = torch.randn(3, dtype=torch.complex64)
    tree = [number, number.conj(), number.conj().imag, number.imag, torch.empty(0), torch.empty(0)]
    assert len(encode_plain(tree, key="x")[1]) == len(tree)


def test_names_are_unique_and_none_is_reserved() -> None:
    tree = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2), "__metadata__": torch.ones(3), "a.b~": torch.ones(4)}
    names = [name for name, _ in encode_plain(tree, key="x")[1]]
    assert names == ["a.b", "a.b~", "__metadata__~", "a.b~~"]
    assert [name for name, _ in encode_plain(torch.ones(1), key="x")[1]] == ["tensor"]
    assert_same_state(round_trip(tree), tree)


def test_keys_that_would_be_one_are_refused_when_they_are_saved() -> None:
    other = float("nan")
    for keys in (
        {math.nan: 1, other: 2},
        {(math.nan,): 1, (other,): 2},
        {math.nan, other},
        {1, (2, other), (2, math.nan)},
    ):
        with pytest.raises(
            SerializationError, match="two keys of one dictionary or set cannot be told apart"
        ) as caught:
            encode_plain({"x": [keys]}, key="state")
        assert caught.value.key == "state.x.0"
    assert repr(round_trip({math.nan: {math.nan}})) == "{nan: {nan}}"


@pytest.mark.parametrize("factory", [tuple, collections.OrderedDict, torch.nn.Parameter])
def test_tensors_in_a_defaultdict_of_another_factory_are_in_its_object_alone(factory: Any) -> None:
    tree = {"a": collections.defaultdict(factory, w=torch.ones(2)), "b": torch.zeros(3)}
    skeleton, tensors = encode_plain(tree, key="state", objects={})
    assert [name for name, _ in tensors] == ["b"]
    back = decode_plain(json.loads(json.dumps(skeleton)), [tensors[0][1]], rebuilds=True, weights_only=False)
    assert back["a"].default_factory is factory
    assert_same_state(dict(back["a"]), dict(tree["a"]))


def test_keys_of_one_hash_are_refused_when_they_are_saved() -> None:
    same = [number * (2**61 - 1) for number in range(1, 103)]
    for keys in (dict.fromkeys(same), collections.OrderedDict.fromkeys(same), set(same), frozenset(same)):
        with pytest.raises(SerializationError, match="102 keys of one dictionary or set have the same hash") as caught:
            encode_plain({"x": [keys]}, key="state")
        assert caught.value.key == "state.x.0"
    assert round_trip(set(same[:100])) == set(same[:100])


def test_a_path_that_json_would_change_is_an_object() -> None:
    path = PurePosixPath("\ud83d\ude00")
    skeleton, _ = encode_plain({"a": path}, key="state", objects={})
    assert decode_plain(json.loads(json.dumps(skeleton)), [], rebuilds=True, weights_only=False) == {"a": path}


Point = collections.namedtuple("Point", "x y")


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (threading.Lock(), "lock"),
        (lambda: 0, "function"),
        (Point(1, 2), "Point"),
        (Text("a"), "Text"),
        (slice(torch.ones(1)), "slice"),
        (datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), "datetime"),
        (datetime.time(2, fold=1), "time"),
        (enum.Enum("Color", "RED")(1), "Color"),
        (np.array([object()]), "ndarray"),
        (np.zeros(1, dtype=[("a", "f4")]), "ndarray"),
        (collections.defaultdict(Path), "defaultdict"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.Generator(), "Generator"),
        ({torch.ones(1): 1}, "key"),
        ({torch.ones(1)}, "set"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_with_its_key_and_a_remedy(value: Any, named: str) -> None:
    with pytest.raises(SerializationError) as caught:
        encode_plain({"callbacks": [{"state": value}]}, key="trainer")
    assert caught.value.key == "trainer.callbacks.0.state"
    assert caught.value.remedy
    assert named in str(caught.value)


def test_a_state_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {"a": {}}
    tree["a"]["b"] = [tree]
    with pytest.raises(SerializationError, match="contains itself") as caught:
        encode_plain(tree, key="state")
    assert caught.value.key == "state.a.b.0"


def test_a_list_of_the_same_list_twice_and_so_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_core.tree._MOST_REPEATS", 10_000)
    tree: list[Any] = [1]
    for _ in range(40):
        tree = [tree, tree]
    with pytest.raises(SerializationError, match="in more than 10,000 places") as caught:
        encode_plain({"a": tree}, key="state")
    assert caught.value.key.startswith("state.a.")


def test_plain_lists_may_be_in_any_number_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_core.tree._MOST_REPEATS", 3)
    shared = [0.9, 0.999]
    skeleton, _ = encode_plain([shared] * 10, key="state")
    assert skeleton == [shared] * 10
    skeleton, _ = encode_plain([[shared]] * 4, key="state")
    assert skeleton == [[shared]] * 4
    with pytest.raises(SerializationError):
        encode_plain([[shared]] * 5, key="state")


def test_sets_in_sets_that_exhaust_the_stack_are_refused() -> None:
    tree: Any = 1
    for _ in range(199):
        tree = frozenset([tree])

    def with_less_stack(frames: int) -> None:
        if frames:
            with_less_stack(frames - 1)
        else:
            encode_plain({"x": tree}, key="state")

    with pytest.raises(SerializationError, match="nested too deep"):
        with_less_stack(sys.getrecursionlimit() // 2)


def test_the_same_list_twice_is_no_circle() -> None:
    shared = [1]
    assert round_trip({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


def test_a_state_that_is_too_deep_is_refused() -> None:
    tree: Any = 1
    for _ in range(300):
        tree = [tree]
    with pytest.raises(SerializationError, match="deep"):
        encode_plain(tree, key="state")


BAD = [
    *("$", "$-1", "$1x", "$²", "$٣", "$99999999999999999999", "$7"),
    *({"$what": 1}, {"$tuple": 1}, {"$tuple": {"a": 1}}, {"$dict": [[1]]}, {"$dict": [[1, 2], [1, 3]]}, {"$dict": 3}),
    *(
        {"$dict": [[[1], 2]]},
        {"$set": [[1]]},
        {"$int": 1},
        {"$int": "zz"},
        {"$float": "1"},
        {"$float": 1},
        {"$bytes": "x"},
    ),
    *(
        {"$dtype": "nn"},
        {"$dtype": "Tensor"},
        {"$device": "nowhere"},
        {"$range": [1, 2, 0]},
        {"$range": "ab"},
        {"$size": ["a"]},
    ),
    *({"$array": ["O", [1], "$0"]}, {"$array": ["<f4", [-1], "$0"]}, {"$array": ["<f4", [2], "x"]}, {"$array": 1}),
    *(
        {"$scalar": ["O", "00"]},
        {"$scalar": ["<f4", ""]},
        {"$scalar": ["<f4", "0"]},
        {"$complex": ["$0", 1]},
        {"$complex": [1]},
        {"$path": ["Path", "x"]},
        {"$path": ["PosixPath", ["x"]]},
        {"$date": 3},
        {"$datetime": "today"},
        {"$deque": [-1, []]},
        {"$deque": [1]},
        {"$slice": ["a"]},
    ),
    *(
        {"$defaultdict": ["eval", []]},
        {"$defaultdict": ["list"]},
        {"$tuple": [1], "b": 2},
        {"$range": ["$0", "$0", "$0"]},
    ),
]


@pytest.mark.parametrize("skeleton", BAD, ids=repr)
def test_what_no_state_was_encoded_to_is_refused(skeleton: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_plain(["$0", skeleton], [torch.zeros(4, dtype=torch.uint8)])


def test_a_structure_that_is_too_deep_is_refused() -> None:
    skeleton: Any = 1
    for _ in range(300):
        skeleton = [skeleton]
    with pytest.raises(ValueError, match="deep"):
        decode_plain(skeleton, [])


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3) | st.sampled_from(["$0", "$1", "$$"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["a", "$tuple", "$dict", "$set", "$array", "$size", "$counter", "$defaultdict", "$x"]),
                inner,
                max_size=2,
            )
        ),
        max_leaves=8,
    )
)
def test_any_json_is_a_state_or_a_value_error(skeleton: Any) -> None:
    try:
        decode_structure(skeleton)
        decode_plain(skeleton, [torch.zeros(4, dtype=torch.uint8)] * 2)
    except ValueError:
        pass


def test_nothing_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    state = {"a": torch.ones(2), "b": (1, {2: np.arange(3)}), "c": {torch.float16}}
    assert torch.equal(round_trip(state)["a"], torch.ones(2))
