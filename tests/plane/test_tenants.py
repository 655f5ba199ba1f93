"""Tenants in one cache: a flood by one evicts only its own share."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.kept import Content
from dataplane.blocks.layout import BlockTables, KVLayout, uniform_shape
from dataplane.blocks.shares import TenantShares
from schemas.block import hash_blocks
from schemas.ids import BlockHash

BLOCK = 4
LAYOUT = KVLayout(weights="w", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=BLOCK)


def cache_of(num_blocks: int) -> BlockCache:
    return BlockCache(uniform_shape(LAYOUT, num_blocks), chunk_tokens=64)


def hashes_of(tenant: str, number: int, num_blocks: int) -> list[BlockHash]:
    return hash_blocks([number] * num_blocks * BLOCK, BLOCK, model_fingerprint="f", tenant=tenant)


def begin(cache: BlockCache, tenant: str, number: int, num_blocks: int) -> BlockTables:
    """Admit and compute a sequence."""
    hashes = hashes_of(tenant, number, num_blocks)
    allocation = cache.admit(hashes, num_blocks * BLOCK, 0, tenant=tenant)
    assert allocation is not None
    cache.store(allocation.tables, hashes, 0, num_blocks * BLOCK, 0, ended=True)
    return allocation.tables


def run(cache: BlockCache, tenant: str, number: int, num_blocks: int) -> None:
    cache.free(begin(cache, tenant, number, num_blocks))
    cache.check_integrity()


def num_kept(cache: BlockCache, tenant: str, number: int, num_blocks: int) -> int:
    return sum(cache.holds(block_hash, tenant) for block_hash in hashes_of(tenant, number, num_blocks))


@pytest.mark.parametrize("size", [1, 3, 8, 20])
def test_a_flood_of_a_hundred_pools_leaves_another_tenant_its_share(size: int) -> None:
    cache = cache_of(40)
    run(cache, "b", 1, 20)
    for number in range(100 * 40 // size):
        run(cache, "a", number, size)
        assert num_kept(cache, "b", 1, 20) == 20
    assert cache.num_of("a") == 20


def test_what_is_over_the_share_goes_to_whoever_needs_it() -> None:
    cache = cache_of(40)
    run(cache, "b", 1, 40)
    run(cache, "a", 1, 10)
    assert (cache.num_of("a"), cache.num_of("b"), cache.num_free) == (10, 30, 0)
    run(cache, "a", 2, 10)
    run(cache, "a", 3, 10)
    assert (cache.num_of("a"), num_kept(cache, "b", 1, 40)) == (20, 20)
    assert num_kept(cache, "b", 1, 20) == 20, "of one sequence its end goes first"
    assert (num_kept(cache, "a", 1, 10), num_kept(cache, "a", 2, 10), num_kept(cache, "a", 3, 10)) == (0, 10, 10)


def test_three_tenants_have_a_third_each() -> None:
    cache = cache_of(30)
    for tenant in "ab":
        run(cache, tenant, 1, 15)
    for number in range(50):
        run(cache, "c", number, 5)
    assert {tenant: cache.num_of(tenant) for tenant in "abc"} == {"a": 10, "b": 10, "c": 10}


def test_blocks_in_use_count_for_their_tenant() -> None:
    """Who runs much keeps little: the next one's room is its own."""
    cache = cache_of(40)
    run(cache, "b", 1, 15)
    run(cache, "a", 1, 5)
    running = begin(cache, "a", 2, 20)
    run(cache, "a", 3, 5)
    assert num_kept(cache, "b", 1, 15) == 15 and num_kept(cache, "a", 1, 5) == 0
    cache.free(running)
    cache.check_integrity()


def test_nobody_waits_for_what_others_keep() -> None:
    """A share is no reservation: what runs comes before what is kept."""
    cache = cache_of(40)
    run(cache, "b", 1, 20)
    assert cache.admit([], 40 * BLOCK, 0, tenant="a") is not None
    assert num_kept(cache, "b", 1, 20) == 0


def test_one_tenant_alone_has_all_of_it() -> None:
    cache = cache_of(40)
    run(cache, "a", 1, 20)
    run(cache, "a", 2, 20)
    assert cache.coldest(3) == [Content("a", each) for each in hashes_of("a", 1, 20)[:-4:-1]]
    run(cache, "a", 3, 5)
    assert [num_kept(cache, "a", number, size) for number, size in ((1, 20), (2, 20), (3, 5))] == [15, 20, 5]


def test_whose_blocks_are_gone_counts_no_more() -> None:
    cache = cache_of(40)
    run(cache, "b", 1, 1)
    running = cache.admit([], 40 * BLOCK, 0, tenant="a")
    assert running is not None and cache.num_of("b") == 0
    cache.free(running.tables)
    run(cache, "a", 1, 40)
    assert cache.num_of("a") == 40, "all is the only tenant's"


def test_spare_blocks_push_nothing_out() -> None:
    cache = cache_of(10)
    run(cache, "b", 1, 6)
    assert cache.admit_spare(5, "a") is None
    tables = cache.admit_spare(4, "a")
    assert tables is not None
    hashes = hashes_of("a", 1, 7)
    cache.keep(tables, hashes[3:6])
    cache.check_integrity()
    assert [cache.holds(block_hash, "a") for block_hash in hashes] == [False] * 3 + [True] * 3 + [False]
    assert cache.num_free == 1 and num_kept(cache, "b", 1, 6) == 6
    lent = cache.lend(hashes[3:], 3, "a")
    assert lent is not None and lent.num_cached_tokens == 6 * BLOCK


@given(seed=st.integers(0, 10**6), num_tenants=st.integers(1, 4), num_blocks=st.integers(8, 40))
def test_no_tenant_is_pushed_below_its_share_by_those_above_theirs(
    seed: int, num_tenants: int, num_blocks: int
) -> None:
    rng = random.Random(seed)
    cache = cache_of(num_blocks)
    running: list[tuple[str, BlockTables]] = []
    tenants = "abcd"[:num_tenants]
    for number in range(60):
        if running and rng.random() < 0.5:
            _, tables = running.pop(rng.randrange(len(running)))
            cache.free(tables)
        tenant, size = rng.choice(tenants), rng.randint(1, num_blocks // 4)
        before = {name: cache.num_of(name) for name in tenants}
        allocation = cache.admit([], size * BLOCK, 0, tenant=tenant)
        if allocation is None:
            continue
        hashes = hashes_of(tenant, number, size)
        cache.store(allocation.tables, hashes, 0, size * BLOCK, 0, ended=True)
        running.append((tenant, allocation.tables))
        cache.check_integrity()
        num_with = sum(count > 0 or name == tenant for name, count in before.items())
        share = num_blocks / num_with
        used = dict.fromkeys(tenants, 0)
        for owner, tables in running:
            used[owner] += tables[0].end_block
        for name in tenants:
            pushed = name != tenant and cache.num_of(name) < min(before[name], share) - 1
            assert not pushed or max(used.values()) > share, "only what runs may cost another one its share"


def test_the_rank_of_tenants_changes_as_they_give_up() -> None:
    shares = TenantShares(12)
    for tenant, blocks in (("a", range(6)), ("b", range(6, 11)), ("c", range(11, 12))):
        shares.took(tenant, list(blocks))
        for block in blocks:
            shares.idles(block)
    assert shares.victims(4) == [0, 1, 6, 2]
    assert shares.victims(4, tenant="c", num_wanted=1) == [0, 1, 6, 2]
    assert shares.victims(99)[:3] == [0, 1, 6] and sorted(shares.victims(99)) == list(range(12))
    shares.uses(0)
    assert shares.victims(2) == [1, 2] and len(shares) == 11
