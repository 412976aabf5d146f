"""What a stranger can do to the store by which ranks meet, and what the ranks make of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.diagnostics import HflowError
from hflow.runtime.worker.proof import CODE_BYTES, GroupKey, SignedStore

KEY = GroupKey(b"secret", "1")
ADDRESSES = {f"0/{rank}": f"address of {rank}\0".encode() for rank in range(3)}


def written(key: GroupKey = KEY) -> HashStore:
    """What the ranks of a group leave."""
    store = HashStore()
    for name, address in ADDRESSES.items():
        SignedStore(store, key).set(name, address)
    return store


def put(store: HashStore, value: bytes) -> None:
    store.set("0/1", value)  # type: ignore[arg-type]


def swap(store: HashStore) -> None:
    put(store, store.get("0/2"))


def cut(store: HashStore) -> None:
    put(store, store.get("0/1")[:-1])


def lengthen(store: HashStore) -> None:
    put(store, store.get("0/1") + b"\0")


def of_another_group(store: HashStore) -> None:
    put(store, written(GroupKey(b"secret", "11")).get("0/1"))


def of_another_world(store: HashStore) -> None:
    put(store, written(GroupKey(b"former", "1")).get("0/1"))


def code_of_a_connection(store: HashStore) -> None:
    put(store, KEY.of_connection(0, 1))


def move_the_border(store: HashStore) -> None:
    """Between the key and the value."""
    SignedStore(store, KEY).set("0/1\0x", b"y")
    code, value = store.get("0/1\0x")[:CODE_BYTES], b"xy"
    put(store, code + value)


STRANGERS: list[Callable[[HashStore], None]] = [
    swap, cut, lengthen, of_another_group, of_another_world, code_of_a_connection, move_the_border,
    lambda store: put(store, b""), lambda store: put(store, bytes(CODE_BYTES) + b"an address"),
    lambda store: put(store, ADDRESSES["0/1"]),
]  # fmt: skip


def test_ranks_read_what_ranks_have_written() -> None:
    store = SignedStore(written(), GroupKey(b"secret", "1"))
    store.wait([*ADDRESSES])
    assert {name: store.get(name) for name in ADDRESSES} == ADDRESSES


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_a_stranger_has_written_is_refused(stranger: Callable[[HashStore], None]) -> None:
    store = written()
    stranger(store)
    with pytest.raises(HflowError, match=r"HF404.*`0/1`"):
        SignedStore(store, KEY).get("0/1")
    assert SignedStore(store, KEY).get("0/0") == ADDRESSES["0/0"]


def test_no_two_connections_of_any_group_have_the_same_code() -> None:
    keys = [GroupKey(secret, group) for secret, group in product([b"a", b"b"], ["1", "11", "1 1"])]
    codes = [key.of_connection(*pair) for key in keys for pair in product([1, 2, 11, 12], repeat=2)]
    assert len({*codes}) == len(codes) == 96
