"""The prefix index: hit rules of layer kinds, LRU under a budget, and what stays reachable."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringslab.schedules.prefix_index import Entry, LayerKind, PrefixIndex
from ringslab.schedules.prefix_keys import extend_keys, keys_of_hash_ids, root_key

RING = LayerKind("rings", "boundary", 10)
WHOLE = LayerKind("whole", "every_block", 4)
ROOT = root_key("m", b"1")


def keys_of(tokens, block_size=4):
    keys = []
    extend_keys(keys, ROOT, np.asarray(tokens, np.int32), block_size)
    return keys


def test_keys_are_of_the_whole_prefix():
    """Blocks of 4: 11 tokens have 2 keys; an equal second block behind another first block has
    another key; keys grow with the sequence and do not depend on where it was cut."""
    a, b = keys_of(range(11)), keys_of([9, 1, 2, 3, *range(4, 11)])
    assert len(a) == 2
    assert not set(a) & set(b)
    grown = keys_of(range(9))
    extend_keys(grown, ROOT, np.arange(16, dtype=np.int32), 4)
    assert grown == keys_of(range(16))
    assert grown[:2] == a


def test_keys_depend_on_the_root_and_its_words():
    """("ab", "c") and ("a", "bc") are different models, and so are different ids under them."""
    assert root_key("ab", "c") != root_key("a", "bc") != root_key("a", "bc", "")
    assert keys_of_hash_ids(ROOT, (1, 2), 2) != keys_of_hash_ids(root_key("m"), (1, 2), 2)
    assert keys_of_hash_ids(ROOT, (1, 2, 3), 2) == keys_of_hash_ids(ROOT, (1, 2), 2)


def test_a_ring_needs_its_boundary_and_a_whole_layer_every_block():
    """4 blocks. Rings at 2 and 4, whole layers at 1 to 3: with rings alone 4 blocks hit, with both
    2; without block 1 nothing does, although blocks 2 and 3 are there."""
    keys = keys_of(range(16))
    rings = PrefixIndex((RING,))
    both = PrefixIndex((WHOLE, RING))
    for blocks in (2, 4):
        rings.insert("rings", keys, blocks)
    for blocks in (1, 2, 3):
        assert both.insert("whole", keys, blocks) == []
    assert both.insert("rings", keys, 2) == []
    assert both.insert("rings", keys, 4) == [Entry("rings", keys[3])]  # nobody could reach it
    assert list(rings.boundaries(keys)) == [4, 2]
    assert list(both.boundaries(keys)) == [2]
    both.count_lookup(keys)
    assert both.stats["whole"].hit_blocks == 3
    assert both.stats["rings"].hit_blocks == 2
    gone = both.drop(Entry("whole", keys[0]))
    assert len(gone) == 4
    assert list(both.boundaries(keys)) == []
    assert (len(both), both.used_bytes) == (0, 0)


def test_the_least_recently_used_goes_first():
    """A budget of 2 snapshots: a, b, use a, c evicts b. A budget of less than one keeps none."""
    index = PrefixIndex((RING,), 25)
    a, b, c = (keys_of([i] * 4) for i in range(3))
    assert index.insert("rings", a, 1) == []
    assert index.insert("rings", b, 1) == []
    index.use(a, 1)
    assert index.insert("rings", c, 1) == [Entry("rings", b[0])]
    assert index.used_bytes == 20
    assert PrefixIndex((RING,), 9).insert("rings", a, 1) == [Entry("rings", a[0])]


def test_an_evicted_block_never_hides_a_longer_prefix():
    """Whole layers of 3 blocks fill the budget; the 4th evicts none of its own ancestors but the
    tail of another prompt, longest first, although that was used later than block 1 was made."""
    index = PrefixIndex((WHOLE,), 20)
    long, other = keys_of(range(16)), keys_of([5] * 8)
    for blocks in (1, 2, 3):
        index.insert("whole", long, blocks)
    for blocks in (1, 2):
        index.insert("whole", other, blocks)
    assert index.insert("whole", long, 4) == [Entry("whole", other[1])]
    assert list(index.boundaries(long)) == [4, 3, 2, 1]
    assert list(index.boundaries(other)) == [1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 2)),
        max_size=40,
    ),
    st.integers(0, 60),
    st.booleans(),
)
def test_random_use_keeps_the_rules(steps, budget, hybrid):
    """Random prompts over blocks of 1 token, inserted, used and dropped: bytes stay under the
    budget and are those of the entries; every entry that is kept can be reached."""
    kinds = (WHOLE, RING) if hybrid else (RING,)
    index = PrefixIndex(kinds, budget)
    names = {}
    for tokens, act in steps:
        keys = keys_of(tokens, 1)
        names |= {key: tuple(tokens[: k + 1]) for k, key in enumerate(keys)}
        if act == 2:
            index.drop(Entry("rings", keys[-1]))
        else:
            for blocks in range(1, len(keys) + 1):
                for kind in kinds:
                    index.insert(kind.name, keys, blocks)
        if act == 1:
            index.use(keys, len(keys))
        sizes = {kind.name: kind.entry_bytes for kind in kinds}
        assert index.used_bytes == sum(sizes[entry.kind] for entry in index._entries) <= budget
        assert sum(stats.entries for stats in index.stats.values()) == len(index)
        for entry in index._entries:
            if entry.kind == "rings":
                prefix = keys_of(names[entry.key], 1)
                assert len(prefix) in list(index.boundaries(prefix))


SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "traces"
CONVERSATION = SHARED / "mooncake_conversation_first2000.jsonl"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not beside the repository")
def test_the_blocks_that_a_conversation_trace_can_have():
    """One request after another, endless, an entry at every block: 322, 5,780 and 15,754 blocks of
    the first 200, 1,000 and 2,000 requests. That the last token of a prompt is computed costs no
    block: no prompt ends at its hit."""
    index = PrefixIndex((RING,))
    found, total, at_the_end = {}, 0, 0
    for count, line in enumerate(CONVERSATION.read_text().splitlines(), 1):
        record = json.loads(line)
        keys = keys_of_hash_ids(ROOT, record["hash_ids"], record["input_length"] // 512)
        blocks = next(index.boundaries(keys), 0)
        at_the_end += blocks > 0 and blocks * 512 == record["input_length"]
        total += blocks
        for end in range(1, len(keys) + 1):
            index.insert("rings", keys, end)
        found[count] = total
    assert [found[n] for n in (200, 1000, 2000)] == [322, 5780, 15754]
    assert at_the_end == 0
