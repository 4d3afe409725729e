"""Checkpoints that somebody has changed, in two thousand ways, with checksums made right again.

    python -m tests.checkpoint.mutations [--number 2000] [--seed 0] [--json FILE]      # a part of make faults

Each is loaded into a model that has been trained otherwise. It is refused, and model and optimizer
are what they were; or it is loaded, and then they step and save. Whatever else happens is wrong: another error, a
change before the refusal, a step or a save that fails, a process that dies, more than 10 s or 1 GB, a file elsewhere.
"""

import argparse
import collections
import contextlib
import copy
import functools
import json
import math
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from checkpoint.json_values import DTYPE_OF_CODE
from checkpoint.manifest import MANIFEST
from harness import results
from harness.examine import made_here
from harness.results import Report
from harness.tables import column, made_line, names, sheet_of
from tests.checkpoint import ONE, small, step
from tests.checkpoint.compare import equal, full, weights
from tests.common import STAGES

LONGEST_S, MOST_KB = 10, 2**20
STRANGE = [0, 1, -1, 2, 3, 7, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), True, None, "", "0",
           "\x1b[31m", "a" * 10_000, "../elsewhere", "rank-00000.safetensors", "manifest.json", "float64", "int8",
           "bool", [], [0], [[]], [2**40], {}, {"tuple": []}, {"data": ["float32", [], "AAAAAA=="]},
           {"data": ["int64", [2], "AAAA"]}, {"piece": "model.0.weight"}, {"tensor": "model.0.weight"},
           {"bytes": "AAAA"}, {"dtype": "float32"}, {"complex": [1, 1]}, {"deque": [-1, []]},
           {"device": "cuda:9"}, {"set": [1, 1]}]
NAMES = ["step", "exp_avg", "momentum_buffer", "main_param", "mine", ""]
# (stage, dtype, optimizer, its options): a small model of each, on one rank
ADAMW = {"fused": True, "amsgrad": True, "weight_decay": 0.1}
CASES = [(None, torch.float32, "AdamW", ADAMW), (STAGES[0], torch.float32, "AdamW", ADAMW),
         (STAGES[2], torch.bfloat16, "AdamW", ADAMW), (STAGES[3], torch.float32, "AdamW", ADAMW),
         (STAGES[3], torch.bfloat16, "SGD", {"momentum": 0.9}),  # fused it can't step where some have no momentum
         (None, torch.float32, "Adagrad", {})]

# ------------------------------------------------------------------------------------------------ how one is changed


def tamper(folder, change):
    """Change a checkpoint by `change(manifest, folder)`, and make all checksums right again.

    The manifest has the headers of the files in it, by name: the parts of tensors by key, and `places`. `change` may
    return the text of the manifest, or replace that file.
    """
    file = folder / MANIFEST
    before, manifest = file.read_bytes(), json.loads(file.read_bytes())
    del manifest["crc32"]
    manifest["headers"] = {name: header_of((folder / name).read_bytes()) for name in manifest["files"]}
    texts = {id(header): json.dumps(header) for header in manifest["headers"].values()}
    text = change(manifest, folder)
    with contextlib.suppress(ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        for name, header in manifest.pop("headers").items():
            make_right(folder / name, header, texts.get(id(header)) != json.dumps(header), manifest["files"])
    if is_regular(file) and file.read_bytes() == before:
        text = text or json.dumps(manifest).encode()
        file.write_bytes(b'{"crc32": %d, %b' % (zlib.crc32(text), text[1:]) if text[:1] == b"{" else text)


def make_right(path, header, is_new, files):
    """Write a new header into a file; say in the manifest's `files` what the file is now, whatever it is."""
    if not is_regular(path):
        return
    if is_new:
        content, its = data_of(path.read_bytes()), dict(header)
        path.write_bytes(header_bytes(its.pop("places"), its) + content)
        files[path.name]["bytes"] = path.stat().st_size
    if all(type(crc) is int for crc in files[path.name]["crc32"]):
        content = path.read_bytes()
        data, offsets = data_of(content), [what["data_offsets"] for key, what in header.items() if key != "places"]
        files[path.name]["crc32"] = [zlib.crc32(content[: len(content) - len(data)]),
                                     *(zlib.crc32(data[slice(*of)]) for of in offsets)]


def is_regular(path):
    return path.is_file() and not path.is_symlink()


def text_of(manifest):
    return json.dumps({key: what for key, what in manifest.items() if key != "headers"}).encode()


def header_of(content):
    """Of the bytes of a rank's file, with its `places`."""
    header = json.loads(content[8 : len(content) - len(data_of(content))])
    return {"places": json.loads(header.pop("__metadata__")["places"]), **header}


def header_bytes(places, entries):
    text = json.dumps({"__metadata__": {"places": json.dumps(places)}, **entries}).encode()
    return len(text).to_bytes(8, "little") + text


def data_of(content):
    return content[8 + int.from_bytes(content[:8], "little") :]


# ------------------------------------------------------------------------------------------------- kinds of changes
# Each changes the manifest, or files in the folder, or returns a text for the manifest: see `tamper`.


def places(value, path=()):
    """-> paths of all values in JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def a_place(chance, manifest):
    """-> a container and a key in it. Each part of the manifest is as likely as another."""
    section = chance.choice(sorted(manifest))
    *path, last = section, *chance.choice(list(places(manifest[section])))
    for key in path:
        manifest = manifest[key]
    return manifest, last


def another_value(chance, manifest, _):
    parent, key = a_place(chance, manifest)
    near = [parent[key] + change for change in (-4, -1, 1, 4, 64)] if type(parent[key]) is int else NAMES
    parent[key] = copy.deepcopy(chance.choice(chance.choice([STRANGE, near])))


def an_entry_less(chance, manifest, _):
    parent, key = a_place(chance, manifest)
    del parent[key]


def two_that_changed_places(chance, manifest, _):
    parent, key = a_place(chance, manifest)
    other = chance.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]


def a_tensor_of_another_shape(chance, manifest, folder):
    """Its bytes are there, and where the old ones are kept somebody claims them: only the model knows better."""
    header = manifest["headers"][chance.choice(sorted(manifest["headers"]))]
    key = chance.choice(sorted(header.keys() - {"places"}))
    old = header[key]
    lead = chance.choice([[], [], [0], [1], [2]])
    shape = [*lead, *chance.choice([[], [1], [3], old["shape"], old["shape"][::-1], [*old["shape"], 2]])]
    name, n_bytes = f"own-{chance.randrange(10**9)}", math.prod(shape) * DTYPE_OF_CODE[old["dtype"]].itemsize
    own = {key: {**old, "shape": [*lead, math.prod(shape[len(lead):])], "data_offsets": [0, n_bytes]}}
    places = {key: {"shape": shape, "start": 0}}
    (folder / name).write_bytes(header_bytes(places, own) + bytes(n_bytes))
    manifest["files"][name] = {"bytes": (folder / name).stat().st_size, "crc32": [0, 0]}
    manifest["headers"][name] = {"places": places, **own}
    renamed = [("extra.0.old" if its == key else its, what) for its, what in header.items()]  # in their order
    header.clear()
    header.update(renamed)
    manifest["extra"][0]["dict"].append(["old", {"tensor": "extra.0.old"}])


def a_tensor_of_another_dtype(chance, manifest, _):
    header = manifest["headers"][chance.choice(sorted(manifest["headers"]))]
    entry = header[chance.choice(sorted(header.keys() - {"places"}))]
    size = DTYPE_OF_CODE[entry["dtype"]].itemsize
    entry["dtype"] = chance.choice([name for name, dtype in DTYPE_OF_CODE.items()
                                    if dtype.itemsize == size or chance.random() < 0.2])


def bytes_of_a_file(chance, manifest, folder):
    """What is read is another model's, whatever its values are: it is loaded."""
    name = chance.choice(sorted(manifest["files"]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(chance.choice([1, 10, 1000])):
        content[-1 - chance.randrange(len(data_of(content)))] = chance.randrange(256)
    (folder / name).write_bytes(content)


def another_file(chance, manifest, folder):
    path = folder / chance.choice([*sorted(manifest["files"]), "manifest.json"])
    content = path.read_bytes()
    path.unlink()
    chance.choice([lambda: None, path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"),
                   lambda: path.symlink_to(path), lambda: path.write_bytes(content[:-1]),
                   lambda: path.write_bytes(content + bytes(100)), lambda: path.write_bytes(b"")])()


def a_bit_of_the_manifest(chance, manifest, folder):
    content = bytearray((folder / "manifest.json").read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    (folder / "manifest.json").write_bytes(content)


def noise_for_a_manifest(chance, manifest, folder):
    text = text_of(manifest)
    start = chance.randrange(len(text))
    noise = chance.choice([b"[" * 10**5, b"\xff\xfe", b"9" * 5000, b'"' + b"\\u0000" * 9, b"NaN", b"{}", b"[],"])
    return text[:start] + noise + text[start:]


KINDS = {function.__name__.replace("_", " "): function for function in (
    another_value, an_entry_less, two_that_changed_places, a_tensor_of_another_shape, a_tensor_of_another_dtype,
    bytes_of_a_file, another_file, a_bit_of_the_manifest, noise_for_a_manifest)}

# ---------------------------------------------------------------------------------------------------------- one of them


def made(case, seed):
    """A model that has made a step."""
    stage, dtype, name, options = case
    torch.manual_seed(seed)
    layers = torch.nn.Linear(11, 21), torch.nn.Tanh(), torch.nn.Linear(21, 11)
    return small(ONE, stage, *layers, dtype=dtype, cls=getattr(torch.optim, name), lr=0.01, **options)


def outcome(case, folder, scratch):
    """-> "refused", in one line, and nothing has changed; "loaded"; or what is wrong."""
    model, optimizer = its = made(case, 1)
    before, answer = copy.deepcopy((weights(model), full(optimizer))), "loaded"
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        checkpoint.load(folder, model, optimizer)
    except checkpoint.CheckpointError as error:
        answer = "refused" if equal((weights(model), full(optimizer)), before) else f"changed before it said: {error}"
        if not (str(error).startswith(f"checkpoint {folder} can't be loaded: ") and str(error).isprintable()):
            answer += f", in other words: {error}"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    if time.process_time() - began > LONGEST_S or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory > MOST_KB:
        answer += f", after {time.process_time() - began:.0f} s, or with more than {MOST_KB // 1024} MB"
    try:
        step(*its)
        checkpoint.save(scratch / "again", *its)
    except Exception as error:
        answer += f"; then {type(error).__name__}: {error}"
    return answer


def watch(folder):
    """-> what is written outside of `folder` from now on, or started: a list that grows."""
    seen = []

    def hear(event, arguments):
        is_written = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_written and not str(arguments[0]).startswith((str(folder), "/dev/null")) \
                or event in ("os.system", "subprocess.Popen"):
            seen.append(f"{event} {arguments[0]}")

    sys.addaudithook(hear)
    return seen


def run(number, seed, folder):
    """-> kind -> Counter of "refused", "loaded" and "wrong"."""
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True  # of a stage that is imported on the way: such a file would count as written
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen, table = watch(folder), collections.defaultdict(collections.Counter)
    for turn in range(number):
        print(f"\r{turn}", end="", file=sys.stderr, flush=True)  # which it was, if the process dies
        name, case = sorted(KINDS)[turn % len(KINDS)], turn // len(KINDS) % len(CASES)
        original, mutated = folder / f"original-{case}", folder / "mutated"
        if not original.exists():
            extra = {"step": 2, "average": torch.arange(40.0), "text": "abc", "pair": (1, [2.5, None])}
            checkpoint.save(original, *made(CASES[case], 0), extra)
        for path in (mutated, folder / "again"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, mutated)
        tamper(mutated, functools.partial(KINDS[name], random.Random(f"{seed} {turn}")))
        answer = outcome(CASES[case], mutated, folder)
        if answer == "loaded" and name == "a bit of the manifest":
            answer = "loaded, with another value"
        answer = f"{answer}; {seen.pop()}" if seen else answer
        is_right = answer in ("refused", "loaded")
        table[name][answer if is_right else "wrong"] += 1
        if not is_right:
            print(f"{turn} {name}: {answer[:500]}")
    dist.destroy_process_group()
    return table


def mutation_sheet(table, seed, made):
    """Make the table of how many changed checkpoints were refused, were loaded and then trained, or went wrong."""
    together = sum(table.values(), collections.Counter())
    rows = {**dict(sorted(table.items())), "together": together}
    titles = {"refused": "refused", "loaded": "loaded,\nstepped, saved", "wrong": "wrong"}
    return sheet_of(
        "Checkpoints that somebody has changed", rows, {
            "name": names(str), "tried": column("tried", lambda kind: rows[kind].total(), "counted"),
            **{outcome: column(title, lambda kind, outcome=outcome: rows[kind][outcome], "counted", ".0f")
               for outcome, title in titles.items()}},
        [made_line(made, f"seed {seed}")])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = run(args.number, args.seed, Path(folder).resolve())
    for name, counts in sorted(table.items()):
        print(f"{name:32} {counts['refused']:5} refused {counts['loaded']:5} loaded, stepped and saved "
              f"{counts['wrong']:5} wrong")
    if args.json:
        report = Report(made_here(), {"mutations": mutation_sheet(table, args.seed, made_here())})
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(results.to_json(report))
    sys.exit(any(counts["wrong"] for counts in table.values()))


if __name__ == "__main__":
    main()
