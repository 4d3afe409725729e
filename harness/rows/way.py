"""What a row is."""

from collections.abc import Callable
from typing import NamedTuple

from harness.rows.exchange import in_place_of_gloos
from harness.rows.ways import ddp


class Way(NamedTuple):
    """`kind`: floor (learns nothing of other ranks), reference (what all are compared with), stage (of this tutorial),
    peer, or noise (the reference once more: how far apart two timings of the same thing are).

    `wire_bytes(numel, d)`: what a rank should send in a step. `bytes_per_param(numel, d, optimizer)`: what it should
    hold for a parameter after a step, its gradient included. `starts_apart`: the constructor broadcasts the weights
    from rank 0, which is tried by starting with other ones elsewhere. `dtype`: of the parameters; `reference` builds
    what a row of this dtype must agree with. `sized(bucket_cap_mb)` -> build, where a row has buckets. `inside()`: the
    context in which it is measured: where a reduce-scatter sends what the formula says, see exchange.py.
    """
    name: str
    kind: str
    build: Callable
    wire_bytes: Callable
    bytes_per_param: Callable
    starts_apart: bool = True
    dtype: str = "float32"
    reference: Callable = ddp
    sized: Callable | None = None
    inside: Callable = in_place_of_gloos
