"""Which element belongs to whom: pure functions, no process group."""

import pytest
import torch

from stage3_gradbuffer.buffer import Range, padded_numel, param_starts, ranges_in_shard
from stage4_overlap.buffer import bucket_layout


@pytest.mark.parametrize(
    "numel, world_size, alignment, expected",
    [(16, 4, 1, 16), (17, 4, 1, 20), (16, 4, 16, 64), (1, 1, 1, 1), (0, 3, 4, 0), (100, 3, 16, 144)],
)
def test_padding(numel, world_size, alignment, expected):
    assert padded_numel(numel, world_size, alignment) == expected


@pytest.mark.parametrize(
    "numels, alignment, expected",
    [([5, 2, 9], 1, [0, 5, 7, 16]), ([5, 2, 9], 4, [0, 8, 12, 24]), ([0, 4], 4, [0, 0, 4])],
)
def test_where_parameters_begin_and_the_last_one_ends(numels, alignment, expected):
    assert param_starts(numels, alignment) == expected


def test_shards_ignore_parameter_boundaries():
    """Parameters of 5, 2 and 9 elements, 4 ranks of 4: the second shard has the end of the first parameter."""
    shards = [ranges_in_shard([5, 2, 9], [0, 5, 7, 16], 4 * r, 4 * r + 4) for r in range(4)]
    assert shards[0] == [Range(index=0, start=0, stop=4, offset=0)]
    assert shards[1] == [Range(0, 4, 5, 0), Range(1, 0, 2, 1), Range(2, 0, 1, 3)]
    assert shards[2] == [Range(2, 1, 5, 0)]
    assert shards[3] == [Range(2, 5, 9, 0)]


def test_what_lies_between_parameters_is_in_no_range():
    """The same on 3 ranks of 8, where each parameter begins at a multiple of 4: p0 in 0-4, p1 in 8-9, p2 in 12-20."""
    shards = [ranges_in_shard([5, 2, 9], [0, 8, 12, 24], 8 * r, 8 * r + 8) for r in range(3)]
    assert shards == [[Range(0, 0, 5, 0)], [Range(1, 0, 2, 0), Range(2, 0, 4, 4)], [Range(2, 4, 9, 0)]]


def test_a_shard_may_be_padding_only():
    assert ranges_in_shard([3], [0], 4, 8) == []


@pytest.mark.parametrize("alignment", [1, 4, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_every_element_has_one_owner_and_is_cut_where_alignment_says(world_size, alignment):
    numels = [1, 35, 0, 55, 11, 128, 7]
    *starts, end = param_starts(numels, alignment)
    numel = padded_numel(end, world_size, alignment)
    owners = [torch.zeros(n, dtype=torch.int64) for n in numels]
    for rank in range(world_size):
        shard = numel // world_size
        for r in ranges_in_shard(numels, starts, rank * shard, (rank + 1) * shard):
            owners[r.index][r.start : r.stop] += 1
            assert rank * shard + r.offset == starts[r.index] + r.start
            assert r.start % alignment == r.offset % alignment == 0  # so that a fused kernel rounds it like the whole
    assert all(count.eq(1).all() for count in owners)


MB = 2**20


def test_buckets_hold_whole_parameters_in_reverse_order_and_are_closed_at_the_cap():
    assert bucket_layout([MB] * 11, ["f32"] * 11, 4 * MB) == [[10, 9, 8, 7], [6, 5, 4, 3], [2, 1, 0]]


def test_a_parameter_larger_than_the_cap_is_a_bucket():
    assert bucket_layout([MB, 9 * MB, MB], ["f32"] * 3, 4 * MB) == [[2, 1], [0]]
    assert bucket_layout([MB, 9 * MB, 4 * MB], ["f32"] * 3, 4 * MB) == [[2], [1], [0]]


def test_one_bucket_when_all_is_small():
    assert bucket_layout([8, 8], ["f32"] * 2, MB) == [[1, 0]]


def test_dtypes_have_buckets_of_their_own():
    assert bucket_layout([MB] * 6, ["bf16", "f32"] * 3, 2 * MB) == [[5, 3], [4, 2], [1], [0]]


@pytest.mark.parametrize("cap", [1, 100, 1000, 10**9])
def test_every_parameter_is_in_one_bucket(cap):
    sizes = [(37 * i) % 101 * 4 for i in range(40)]
    buckets = bucket_layout(sizes, [i % 2 for i in range(40)], cap)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(40))
    assert all(len({i % 2 for i in bucket}) == 1 for bucket in buckets)


def test_buckets_and_shards_by_hand():
    """Parameters of 6, 3, 8 and 5 elements in fp32, a cap of 32 bytes, 2 ranks, shards of multiples of 4 elements.

    Parameters 3 and 2 have 52 bytes, and are a bucket of 16 elements: 8 for parameter 3, and 8 for parameter 2.
    Parameters 1 and 0 have 36 bytes: 4 elements for parameter 1, 8 for parameter 0, and 4 that nobody needs.
    """
    numels = [6, 3, 8, 5]
    buckets = bucket_layout([4 * numel for numel in numels], ["f32"] * 4, 32)
    assert buckets == [[3, 2], [1, 0]]
    found = []
    for bucket in buckets:
        *starts, end = param_starts([numels[i] for i in bucket], 4)
        assert padded_numel(end, 2, 4) == 16
        found.append([ranges_in_shard([numels[i] for i in bucket], starts, *shard) for shard in ((0, 8), (8, 16))])
    assert found == [
        [[Range(0, 0, 5, 0)], [Range(1, 0, 8, 0)]],
        [[Range(0, 0, 3, 0), Range(1, 0, 4, 4)], [Range(1, 4, 6, 0)]],
    ]
