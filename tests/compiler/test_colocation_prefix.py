"""Prefixes of colocations, against the colocations themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from hflow.compiler.planner.colocation_prefix import ColocationPrefix
from hflow.compiler.planner.placements import Colocation, set_partitions

PARTS = ("actor", "critic", "reward", "ref", "cost")


@st.composite
def some_colocations(draw: st.DrawFn) -> list[Colocation]:
    """Different ones; some parts are on all devices."""
    found: list[Colocation] = []
    for number in draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)):
        every = set_partitions(PARTS[number:])
        partitions = draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
        firsts = draw(st.sampled_from(((None,), (0, 8))))
        found += [Colocation(p, frozenset(PARTS[:number]), first) for p in partitions for first in firsts]
    return draw(st.permutations(found))


def below(prefix: ColocationPrefix) -> Iterator[ColocationPrefix]:
    """It, and all longer ones."""
    yield prefix
    if not prefix.whole:
        yield from chain.from_iterable(below(longer) for _, longer in prefix.longer)


@given(every=some_colocations())
def test_each_colocation_has_one_prefix_of_each_length(every: list[Colocation]) -> None:
    prefixes = list(chain.from_iterable(map(below, ColocationPrefix.shortest(every))))
    assert sorted(p.colocation for p in prefixes if p.whole) == sorted(every)
    for number, colocation in enumerate(every):
        own = [prefix for prefix in prefixes if number in prefix.numbers]
        assert [prefix.length for prefix in own] == list(range(len(colocation.partition) + 1))
        for prefix in own:
            partition, spread, first = prefix.colocation
            assert (spread, first) == colocation[1:] and prefix.rest == partition[prefix.length :]
            assert partition[: prefix.length] == colocation.partition[: prefix.length]
            assert sorted(chain(*partition)) == sorted(chain(*colocation.partition))
            assert prefix.ungrouped == (len(prefix.numbers) > 1)
            assert all(len(members) == 1 for members in prefix.rest) or partition == colocation.partition


@given(every=some_colocations())
def test_a_longer_one_says_which_set_comes_next(every: list[Colocation]) -> None:
    for prefix in chain.from_iterable(map(below, ColocationPrefix.shortest(every))):
        for members, longer in () if prefix.whole else prefix.longer:
            assert longer.colocation.partition[prefix.length] == members
            assert {*longer.numbers} <= {*prefix.numbers}
