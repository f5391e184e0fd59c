"""Who uses which KV block, and what a free one still holds."""

import pytest

from engine.scheduler.blocks import BlockPool


def make_pool(num_blocks: int = 4) -> BlockPool:
    return BlockPool(num_blocks, block_size=4)


def take(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def put(pool: BlockPool, *names: bytes) -> list[int]:
    """Fill one block per name."""
    blocks = take(pool, len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.commit(block, name)
    return blocks


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        make_pool(0)


def test_all_or_nothing_is_allocated() -> None:
    pool = make_pool()
    assert len(set(take(pool, 3))) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == []


def test_a_partly_filled_block_counts_as_one() -> None:
    assert [make_pool().blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_free_block_keeps_its_content_and_can_be_shared_again() -> None:
    pool = make_pool()
    (block,) = put(pool, b"a")
    pool.free([block])
    assert (pool.usage, pool.find(b"a")) == (0, block)
    pool.share([block])
    pool.share([block])
    assert pool.usage == 0.25
    pool.free([block])
    assert (pool.usage, pool.num_exclusive([block])) == (0.25, 1)
    pool.free([block])
    assert (pool.usage, pool.num_unused([block])) == (0, 1)


def test_freeing_empties_the_owners_list_and_twice_is_a_fault() -> None:
    pool = make_pool()
    blocks = take(pool, 2)
    again = list(blocks)
    pool.free(blocks)
    assert blocks == []
    with pytest.raises(AssertionError, match="twice"):
        pool.free(again)


def test_blank_blocks_are_handed_out_before_content_is_lost() -> None:
    pool = make_pool()
    pool.free(put(pool, b"a", b"b"))
    take(pool, 2)
    assert pool.find(b"a") is not None
    assert pool.find(b"b") is not None


def test_the_content_used_longest_ago_goes_first() -> None:
    pool = make_pool(3)
    a, b, c = put(pool, b"a", b"b", b"c")
    for block in (a, b, c):
        pool.free([block])
    pool.share([a])
    pool.free([a])
    assert take(pool, 1) == [b]
    assert [pool.find(name) for name in (b"a", b"b", b"c")] == [a, None, c]


def test_the_end_of_a_sequence_is_lost_before_its_beginning() -> None:
    pool = make_pool(3)
    pool.free(put(pool, b"a", b"b", b"c"))
    take(pool, 2)
    assert pool.find(b"a") is not None


def test_content_computed_twice_stays_with_the_first_block() -> None:
    pool = make_pool()
    (first,) = put(pool, b"a")
    (second,) = put(pool, b"a")
    assert pool.find(b"a") == first
    pool.free([second])
    assert take(pool, 1) == [second]


def test_forgotten_content_is_not_found_and_its_users_go_on() -> None:
    pool = make_pool()
    used, unused = put(pool, b"a", b"b")
    pool.free([unused])
    pool.forget([used, unused])
    assert pool.find(b"a") is None
    assert pool.find(b"b") is None
    assert pool.num_free == 3
    pool.free([used])
    assert sorted(take(pool, 4)) == [0, 1, 2, 3]


def test_forgetting_what_is_free_tells_whether_anything_is_left() -> None:
    pool = make_pool()
    used, unused = put(pool, b"a", b"b")
    pool.free([unused])
    assert pool.forget_free() is False
    assert (pool.find(b"a"), pool.find(b"b")) == (used, None)
    pool.free([used])
    assert pool.forget_free() is True
