"""Writes an exercise: a stage's core with some bodies taken out, or all variants.

    make exercise STAGE=3 TO=mine            (STAGE=variants)
"""

import argparse
import ast
import sys
from pathlib import Path

from harness import STAGES
from harness.take import ROOT, write_package

ASKED = """
stage1_naive_broadcast/optimizer.py
    ShardedOptimizer.shard: broadcast from rank 0, choose owners, hand on what this rank owns
    ShardedOptimizer.sync_grads: average every gradient
    ShardedOptimizer.step_own: hand on lr and the like, then step the inner optimizer
    ShardedOptimizer.sync_params: for each rank flatten its shard, broadcast, copy back
    ShardedOptimizer.average: flatten, divide by d, all-reduce, copy back
stage2_allgather/optimizer.py
    ShardedOptimizer.sync_params: all-gather padded shards, then copy back
stage3_gradbuffer/optimizer.py
    ShardedOptimizer.sync_grads: reduce-scatter each buffer
    ShardedOptimizer.sync_params: take main parameters, gather all, copy to the model
stage3_gradbuffer/buffer.py
    GradBuffer.attach: make the view the gradient: param.grad, or param.main_grad
    GradBuffer.take_grad: add to main_grad where dtypes differ
    GradBuffer.reduce_scatter_grads: the average goes into grad_shard, in place
    GradBuffer.take_main_params: main_params go into their ranges of param_shard
    GradBuffer.all_gather_params: param_shard of all ranks goes into flat_params, in place
    GradBuffer.copy_params_to_model: views of flat_params go into params
    ranges_in_shard: which part of each parameter lies in the shard
stage4_overlap/optimizer.py
    ShardedOptimizer.sync_grads: receive all that travels
    ShardedOptimizer.sync_params: empty each gradient, start each bucket, in forward order
    ShardedOptimizer.on_grad_ready: note it in its bucket, then send full buckets
    ShardedOptimizer.send_full_buckets: in bucket order; after the last the queue begins anew
    ShardedOptimizer.send_grads: in an idle buffer; if none is, receive the oldest first
    ShardedOptimizer.receive_oldest: finish the first that travels, which is idle then
    ShardedOptimizer.wait_for_own_params: finish the buckets of this module's parameters
stage4_overlap/buffer.py
    Bucket.start_param_sync: main parameters to the model's, then all-gather
    Bucket.finish_param_sync: wait for the works, once
    PartitionedGradient.add: the first part replaces what is empty, others are added
    BucketBuffer.start_grad_sync: _foreach_copy_ into slots, divide, let go, clear bucket.ready, send
    BucketBuffer.finish_grad_sync: wait, then add the parts to the bucket's gradient
stage4_overlap/transport.py
variants/per_parameter.py
    ShardedOptimizer.shard: a buffer for each parameter, one inner group for each group
variants/muon.py
    owners: the most laborious first, to the rank with the least work so far
    WholeBucket.place: what a rank owns lies together, rank after rank; lengths, numel, starts, ranges
    WholeBucket.partition: the core's, then main parameters and gradients in the model's shapes
    ShardedOptimizer.pack: the bucket's gradients are used up, and its parameters leave
variants/hybrid.py
    Replicas.shard: all groups start alike, then the core's
    ReplicasOfStage3.sync_grads: the core's, then the average of each buffer's shard across the groups
    ReplicasOfStage4.receive_oldest: the core's, then the same of the shard that has come
variants/wire16.py
    WireBuffer.wire_dtype: what a gradient is on the wire
    ShardedOptimizer.shard: parts are to be added in fp32, then the core's
variants/remainder16.py
    SplitParameter.main_shard: put together from shard and remainder, where it has no memory
    SplitParameter.copy_main_to_model: split into shard and remainder, then let go of the memory
variants/by_bucket.py
variants/moments16.py
    ShardedOptimizer.unpack: moments of this bucket in fp32
    ShardedOptimizer.pack: moments of this bucket in bf16
    ShardedOptimizer.cast_moments: what of the inner optimizer's state has its parameter's shape
variants/offload.py
    HostParameter.__init__: shard, and main_shard on the CPU, of fp32 at least
    HostBuffer.finish_grad_sync: wait, add the parts up, give the sum to the host's gradient
variants/finite.py
    ShardedOptimizer.send_grads: note for each gradient whether it is finite, then the core's
    ShardedOptimizer.sync_grads: the core's, then all ranks learn of all, and raise
variants/blocks.py
    BlockBucket.place: the core's, with another alignment
guard/chained.py
    Chained.no_sync: that of all of them
    Chained.clip_grad_norm_: average, one norm over all, scale all by it
"""  # file, and in it: function to be filled in: what is asked for


def asked_of(folder):
    """-> {file of an exercise: {function: what is asked for}}: of a stage, or of "variants"."""
    found = {}
    for line in ASKED.splitlines():
        if line and not line.startswith(" "):
            its = found.setdefault(line, {})
        elif line:
            function, _, what = line.strip().partition(": ")
            its[function] = what
    return {path: its for path, its in found.items()
            if path.startswith(folder) or folder == "variants" and path.startswith("guard")}


def functions(tree):
    """(name, node) of each function of a module, and of each method as "Class.method"."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{child.name}", child) for child in node.body
                        if isinstance(child, ast.FunctionDef))


def emptied(source, asked, path):
    """-> the source without the bodies of the functions in `asked`; signatures and docstrings stay.

    Raises LookupError where there is no function of such a name.
    """
    tree, lines = ast.parse(source), source.splitlines()
    found = dict(functions(tree))
    if missing := asked.keys() - found.keys():
        raise LookupError(f"grade/skeleton.py: {path} has no {', '.join(sorted(missing))}")
    for name in sorted(asked, key=lambda name: -found[name].lineno):  # the last one first: lines keep their numbers
        node = found[name]
        first = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
        indent = " " * (node.col_offset + 4)
        fill_in = f"fill in {name.split('.')[-1]}: {asked[name]}"
        lines[first : node.end_lineno] = [f'{indent}raise RuntimeError("{fill_in}")']
    end = tree.body[0].end_lineno - 1  # of the module's docstring: a line with nothing but quotes
    bodies = "1 body" if len(asked) == 1 else f"{len(asked)} bodies"
    exercise = f"Exercise: fill in {bodies}, see docs/exercise.md. The solution is {path}."
    lines[end:end] = ["", exercise] * bool(asked)
    return "\n".join(lines) + "\n"


def write(what, to):
    """An exercise: a stage by its package or its number, or "variants".

    Raises ValueError: there is no such exercise, or `to` is no place for a package.
    """
    folder = next((folder for folder in [*STAGES, "variants"] if what in (folder, folder[5:6])), None)
    if folder is None:
        raise ValueError(f"STAGE={what}: there are the exercises 1, 2, 3, 4, and variants")
    files = {Path(path).name: emptied((ROOT / path).read_text(encoding="utf-8"), its, path)
             for path, its in asked_of(folder).items()}
    write_package(to, {"__init__.py": "", **files})


def main():
    parser = argparse.ArgumentParser(prog="exercise", description=__doc__.splitlines()[0])
    parser.add_argument("what")
    parser.add_argument("to", type=Path)
    args = parser.parse_args()
    try:
        write(args.what, args.to)
    except (ValueError, OSError) as reason:
        print(f"exercise: {reason}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.to}: fill in its bodies, then make grade STAGE={args.to}")


if __name__ == "__main__":
    main()
