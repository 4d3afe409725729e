"""Writes an exercise: a stage's core with some bodies taken out, a ring, all variants, or a drill.

    make exercise STAGE=3 TO=mine            (STAGE=0, STAGE=variants, STAGE=drill1)
"""

import ast
import re
import sys
from pathlib import Path

from grade import drills
from harness import STAGES
from harness.take import ROOT, write_package

ASKED = {  # exercise -> file -> function to be filled in -> what is asked for
    STAGES[0]: {"stage1_naive_broadcast/optimizer.py": {
        "shard": "broadcast from rank 0, choose owners, hand on what this rank owns",
        "sync_grads": "average every gradient",
        "step_own": "hand on lr and the like, then step the inner optimizer",
        "sync_params": "for each rank flatten its shard, broadcast, copy back",
        "average": "flatten, divide by d, all-reduce, copy back"}},
    STAGES[1]: {"stage2_allgather/optimizer.py": {"sync_params": "all-gather padded shards, then copy back"}},
    STAGES[2]: {"stage3_gradbuffer/optimizer.py": {
        "sync_grads": "reduce-scatter each buffer",
        "sync_params": "take main parameters, gather all, copy to the model"
    }, "stage3_gradbuffer/buffer.py": {
        "attach": "make the view the gradient: param.grad, or param.main_grad",
        "take_grad": "add to main_grad where dtypes differ",
        "reduce_scatter_grads": "the average goes into grad_shard, in place",
        "take_main_params": "main_params go into their ranges of param_shard",
        "all_gather_params": "param_shard of all ranks goes into flat_params, in place",
        "copy_params_to_model": "views of flat_params go into params",
        "ranges_in_shard": "which part of each parameter lies in the shard"}},
    STAGES[3]: {"stage4_overlap/optimizer.py": {
        "sync_grads": "receive all that travels",
        "sync_params": "empty each gradient, start each bucket, in forward order",
        "on_grad_ready": "note it in its bucket, then send full buckets",
        "send_full_buckets": "in bucket order; after the last the queue begins anew",
        "send_grads": "in an idle buffer; if none is, receive the oldest first",
        "receive_oldest": "finish the first that travels, which is idle then",
        "wait_for_own_params": "finish the buckets of this module's parameters",
    }, "stage4_overlap/buffer.py": {
        "start_param_sync": "main parameters to the model's, then all-gather",
        "finish_param_sync": "wait for the works, once",
        "add": "the first part replaces what is empty, others are added",
        "start_grad_sync": "_foreach_copy_ into slots, divide, let go, clear bucket.ready, send",
        "finish_grad_sync": "wait, then add the parts to the bucket's gradient",
    }, "stage4_overlap/transport.py": {}},
    "stage0": {"grade/ring.py": {
        "reduce_scatter": "d - 1 turns: send a partial sum on, add yours to what arrives",
        "all_gather": "d - 1 turns: send on what arrived last"}},
    "variants": {"variants/per_parameter.py": {
        "shard": "a buffer for each parameter, one inner group for each group",
    }, "variants/muon.py": {
        "owners": "the most laborious first, to the rank with the least work so far",
        "place": "what a rank owns lies together, rank after rank; lengths, numel, starts, ranges",
        "partition": "the core's, then main parameters and gradients in the model's shapes",
        "pack": "the bucket's gradients are used up, and its parameters leave",
    }, "variants/hybrid.py": {
        "shard": "all groups start alike, then the core's",
        "sync_grads": "the core's, then the average of each buffer's shard across the groups",
        "receive_oldest": "the core's, then the same of the shard that has come",
    }, "variants/wire16.py": {
        "wire_dtype": "what a gradient is on the wire",
        "shard": "parts are to be added in fp32, then the core's",
    }, "variants/remainder16.py": {
        "main_shard": "put together from shard and remainder, where it has no memory",
        "copy_main_to_model": "split into shard and remainder, then let go of the memory",
    }, "variants/by_bucket.py": {}, "variants/moments16.py": {
        "unpack": "moments of this bucket in fp32",
        "pack": "moments of this bucket in bf16",
        "cast_moments": "what of the inner optimizer's state has its parameter's shape",
    }, "variants/offload.py": {
        "HostParameter.__init__": "shard, and main_shard on the CPU, of fp32 at least",
        "finish_grad_sync": "wait, add the parts up, give the sum to the host's gradient",
    }, "variants/finite.py": {
        "send_grads": "note for each gradient whether it is finite, then the core's",
        "sync_grads": "the core's, then all ranks learn of all, and raise",
    }, "variants/blocks.py": {
        "place": "the core's, with another alignment",
    }, "guard/chained.py": {
        "Chained.no_sync": "that of all of them",
        "clip_grad_norm_": "average, one norm over all, scale all by it"}},
}


def functions(tree):
    """-> {name: node} of each function of a module, and of each method as "Class.method"."""
    methods = {f"{node.name}.{child.name}": child for node in tree.body if isinstance(node, ast.ClassDef)
               for child in node.body if isinstance(child, ast.FunctionDef)}
    return {**{node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}, **methods}


def emptied(path, asked):
    """-> the source in `path` without the bodies of the functions in `asked`; signatures and docstrings stay."""
    source = (ROOT / path).read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    for name, node in sorted(functions(tree).items(), key=lambda pair: -pair[1].lineno):  # lines keep their numbers
        short = name.split(".")[-1]
        if hint := asked.get(short) or asked.get(name):
            first = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
            fill_in = f'raise RuntimeError("fill in {short}: {hint}")'
            lines[first : node.end_lineno] = [" " * (node.col_offset + 4) + fill_in]
    end = tree.body[0].end_lineno - 1  # of the module's docstring: a line with nothing but quotes
    bodies = "1 body" if len(asked) == 1 else f"{len(asked)} bodies"
    exercise = f"Exercise: fill in {bodies}, see docs/exercise.md. The solution is {path}."
    lines[end:end] = ["", exercise] * bool(asked)
    text = "\n".join(lines) + "\n"
    return re.sub(r"^from \.(?=\w)", "from guard.", text, flags=re.MULTILINE) if path.startswith("guard/") else text


def write(what, to):
    """Write an exercise: of a stage, by its package or number, "variants", "drill1". Raises ValueError or OSError."""
    if re.fullmatch(r"drill\d+", what):
        return write_package(to, drills.files(int(what.removeprefix("drill"))))
    exercise = next((exercise for exercise in ASKED if what in (exercise, exercise[5:6])), None)
    if exercise is None:
        raise ValueError(f"STAGE={what}: there are the exercises 0 to 4, variants, and drill1 to drill8")
    files = {Path(path).name: emptied(path, asked) for path, asked in ASKED[exercise].items()}
    write_package(to, {"__init__.py": "", **files})


def main(what, to):
    try:
        write(what, to)
    except (ValueError, OSError) as reason:
        print(f"exercise: {reason}", file=sys.stderr)
        sys.exit(2)
    if what.startswith("drill"):
        print(f"{(to / 'REPORT.md').read_text().strip()}\n\nFind it in {to}/, mend it, then make grade STAGE={to}")
    else:
        print(f"{to}: fill in its bodies, then make grade STAGE={to}{'.ring' if what == '0' else ''}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
