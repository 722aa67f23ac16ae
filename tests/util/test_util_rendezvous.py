"""A sealed store: only who knows the secret reads and writes it."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore

from rally.util.rendezvous import SealedStore


@given(key=st.text(min_size=1, max_size=30), value=st.binary(max_size=200))
def test_what_is_written_is_read_and_nobody_else_reads_it(key: str, value: bytes) -> None:
    inner = HashStore()
    one, other, stranger = (SealedStore(inner, secret) for secret in (b"secret", b"secret", b"guess"))
    one.set(key, value)
    assert other.check([key]) and other.get(key) == value and not stranger.check([key])
    [name] = inner.list_keys()
    assert name != key and (len(value) < 4 or value not in inner.get(name))


def test_equal_values_are_not_seen_to_be_equal() -> None:
    inner = HashStore()
    store = SealedStore(inner, b"secret")
    store.set("a", "the same value")
    store.set("b", "the same value")
    first, second = (inner.get(name) for name in inner.list_keys())
    assert first != second and store.get("a") == store.get("b") == b"the same value"


@pytest.mark.parametrize("place", [0, 20, -1])
def test_a_changed_value_is_an_error(place: int) -> None:
    inner = HashStore()
    store = SealedStore(inner, b"secret")
    store.set("key", "value")
    [name] = inner.list_keys()
    content = bytearray(inner.get(name))
    content[place] ^= 1
    for wrong in (bytes(content), b"", b"short", inner.get(name)[:-1]):
        inner.set(name, wrong)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="does not belong to this run has written 'key'"):
            store.get("key")


def test_a_value_that_was_moved_from_another_key_is_an_error() -> None:
    inner = HashStore()
    store = SealedStore(inner, b"secret")
    store.set("a", "1")
    [first] = inner.list_keys()
    store.set("b", "2")
    [second] = [name for name in inner.list_keys() if name != first]
    inner.set(second, inner.get(first))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="has written 'b'"):
        store.get("b")


def test_torch_uses_it_as_any_other_store() -> None:
    inner = HashStore()
    sealed = SealedStore(inner, b"secret")
    store = PrefixStore("group", sealed)
    store.set("key", "value")
    store.wait(["key"], timedelta(seconds=1))
    assert store.get("key") == b"value" and store.check(["key"]) and not store.check(["other"])
    with pytest.raises(RuntimeError):  # torch's DistStoreError is one
        store.wait(["other"], timedelta(milliseconds=10))
    sealed.set("late", "1")
    sealed.close()
    assert not sealed.check(["late"])
