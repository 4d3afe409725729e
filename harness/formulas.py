"""What a way to train should send and hold with AdamW, of Ψ parameters (`numel`) on d ranks: as its chapter derives."""

PIECE = 2**18  # elements of a message of `compute + bytes`: 1 MiB, as in stage 4
BYTES = 4  # of a parameter and of a gradient, fp32; AdamW's two moments are as large each


def travels(times):
    """Parameter-sized exchanges (all-gather, reduce-scatter; an all-reduce is two) -> bytes a rank sends in a step."""
    return lambda numel, d: times * BYTES * numel * (d - 1) / d


def replicated(numel, d, optimizer):
    return 4 * BYTES  # parameter, gradient, two moments


def replicated_and_two_pieces(numel, d, optimizer):
    return 4 * BYTES + 2 * BYTES * PIECE / numel


def sharded_moments(numel, d, optimizer):
    return 2 * BYTES + 2 * BYTES / d


def sharded_all(numel, d, optimizer):
    return 4 * BYTES / d  # the whole parameters are there from the forward to the backward pass only


def sharded_by_owner(numel, d, optimizer):
    return BYTES + 3 * BYTES / d


def sharded_gradients(numel, d, optimizer):
    """Parameters are whole, gradients and moments 1/d; plus the two buffers that buckets of gradients go through."""
    return BYTES + 3 * BYTES / d + optimizer.bucket_buffer_bytes / numel


def replicated_main_params(numel, d, optimizer):
    return 2 + 2 + 4 * BYTES  # parameter and gradient, 16-bit; fp32: main parameter, its gradient, two moments


def sharded_main_params(numel, d, optimizer):
    return 2 + 4 * BYTES / d + optimizer.bucket_buffer_bytes / numel


def sharded_main_grads(numel, d, optimizer):
    return 2 + BYTES + 3 * BYTES / d  # parameter, its fp32 gradient in the buffer; main parameter, two moments


def sharded_16bit_grads(numel, d, optimizer):
    return 2 + 2 + 4 * BYTES / d  # parameter and gradient; main parameter, its gradient, two moments


UPDATE_BYTES = 7 * 4  # of a parameter in AdamW, fp32: read p, g, m, v, write p, m, v


def ranks_in_a_group(d):
    """Of hybrid: pairs, where that leaves several."""
    return 2 if d > 2 and d % 2 == 0 else 1


def on_two_lines(numel, d):
    """Within a group, and the shards across."""
    s = ranks_in_a_group(d)
    r = d // s
    return (2 * BYTES * (s - 1) / s + 2 * BYTES / s * (r - 1) / r) * numel


def replicated_pairs(numel, d, optimizer):
    return BYTES + 3 * BYTES / ranks_in_a_group(d) + optimizer.bucket_buffer_bytes / numel
