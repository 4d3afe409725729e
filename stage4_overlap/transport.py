"""What travels how: NCCL has the collectives that stage 4 wants; on gloo the ranks exchange parts.

gloo's reduce-scatter is an all-reduce underneath, which sends twice the bytes, and its all-gather receives into a
buffer of its own, and copies out of it.
"""

import torch.distributed as dist

PIECE_BYTES = 1 << 20  # gloo is fast up to 1 MiB a message and peer


def transport_for(process_group, device, reduce_dtype):
    """-> how gradients and parameters travel between the ranks of `process_group`."""
    backends = dist.distributed_c10d.BackendConfig(dist.Backend(dist.get_backend_config(process_group)))
    if backends.get_device_backend_map().get(device.type) == "gloo":
        return GlooTransport(process_group)
    return Transport(process_group) if reduce_dtype is None else Exchange(process_group)


class Transport:
    """Native collectives. `sent`, `received` and `shards` are (d, shard_numel): row r is, or will be, rank r's.

    What starts something returns the works to wait for.
    """

    needs_receive_buffer = False

    def __init__(self, process_group):
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)

    def reduce_scatter(self, sent, received):
        return [dist.reduce_scatter_tensor(sent[self.rank], sent.view(-1), group=self.process_group, async_op=True)]

    def parts(self, sent, received):
        """-> what this rank has to add up, (shard_numel,) each, when all has arrived: here the sum itself."""
        return [sent[self.rank]]

    def all_gather(self, shards):
        mine = shards[self.rank]
        return [dist.all_gather_into_tensor(shards.view(-1), mine, group=self.process_group, async_op=True)]


class Exchange(Transport):
    """Each rank sends every other rank that rank's part, and adds up what it receives: in fp32, and in rank order."""

    needs_receive_buffer = True
    tag = 0  # of the messages

    def reduce_scatter(self, sent, received):
        piece, common = PIECE_BYTES // sent.dtype.itemsize, {"group": self.process_group, "tag": self.tag}
        messages = []
        for distance in range(1, self.world_size):
            to, by = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            for mine, theirs in zip(sent[to].split(piece), received[by].split(piece)):
                messages.append(dist.P2POp(dist.isend, mine, group_peer=to, **common))
                messages.append(dist.P2POp(dist.irecv, theirs, group_peer=by, **common))
        return dist.batch_isend_irecv(messages) if messages else []

    def parts(self, sent, received):
        return [*received[: self.rank], sent[self.rank], *received[self.rank + 1 :]]


class GlooTransport(Exchange):
    def all_gather(self, shards):
        """Each rank broadcasts what it has stepped, from there to where it will be read: as many bytes, no copy."""
        common = {"group": self.process_group, "async_op": True}
        turns = zip(*(shard.split(PIECE_BYTES // shard.itemsize) for shard in shards))  # in each a piece of every rank
        return [dist.broadcast(piece, group_src=rank, **common) for turn in turns for rank, piece in enumerate(turn)]
