"""The layers of a GPT, each shared by several ranks: columns, then rows, and between them half a sequence each.

By torch.distributed.tensor.parallel. A rank has whole heads of attention, and as many of the perceptron's 4C values.
What lies between, norms and the stream, is cut along the sequence (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models"). Ranks that share layers see the same batch.
"""

import sys
from pathlib import Path

OTHERS = "stage1_naive_broadcast", "stage2_allgather", "stage3_gradbuffer", "train"  # folders of the other train.py


def misfit(tp, world_size, n_heads, sequence_length):
    """-> why `tp` ranks can't share the layers, or None."""
    if tp > 1 and Path(sys.argv[0]).resolve().parent.name in OTHERS:
        return "it is for stage4_overlap/train.py, whose optimizer takes DTensors"
    for what, n in ((f"{world_size} ranks", world_size), (f"{n_heads} heads", n_heads),
                    (f"sequences of {sequence_length}", sequence_length)):
        if n % tp:
            return f"{tp} ranks can't share each layer, {what} aren't divided by that"


def share_layers(model, tp, rank):
    """Cut the parameters of a GPT into DTensors, in place. -> the process group of the ranks with the same parts.

    Collective over all ranks, `tp` of which share each layer: neighbours, as NVLink joins them.
    """
    from torch.distributed.device_mesh import init_device_mesh  # here, for all of this takes a second
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as by

    mesh = init_device_mesh(rank.device.type, (rank.world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    sequence = Shard(1)  # of (B, T, C)
    columns, rows = by.ColwiseParallel(input_layouts=sequence), by.RowwiseParallel(output_layouts=sequence)
    for block in model.blocks:
        by.parallelize_module(block, mesh["tp"], {
            "attention_norm": by.SequenceParallel(), "attention.to_qkv": columns, "attention.project": rows,
            "mlp_norm": by.SequenceParallel(), "widen": columns, "project": rows})
    by.parallelize_module(model, mesh["tp"], {
        "token_embedding": by.RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "position_embedding": by.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),  # of (T, C)
        "norm": by.SequenceParallel(), "head": by.ColwiseParallel(input_layouts=sequence, output_layouts=Replicate())})
    model.head.weight = model.token_embedding.weight  # cut alike, and one Parameter again
    return mesh["dp"].get_group()
