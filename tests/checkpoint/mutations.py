"""Checkpoints that somebody has changed, in two thousand ways, with checksums made right again.

    python -m tests.checkpoint.mutations [--number 2000] [--seed 0] [--json FILE]      # a part of make faults

Each is loaded in a process beside, into a model that has been trained otherwise. It is refused, and model and optimizer
are what they were; or it is loaded, and then they step and save. Whatever else happens is wrong: another error, a
change before the refusal, a step or a save that fails, a process that dies, more than 10 s or 1 GB, a file elsewhere.
"""

import argparse
import collections
import copy
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import zlib
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from checkpoint import manifest as manifests
from harness import results
from harness.results import MutationResult, MutationRow
from tests.common import STAGES, optimizer_of

LONGEST_S, MOST_KB = 10, 2**20
STRANGE = [0, 1, -1, 2, 3, 7, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), True, None, "", "0",
           "\x1b[31m", "a" * 10_000, "../elsewhere", "rank-00000.bin", "manifest.json", "float64", "int8", "bool", [],
           [0], [[]], [2**40], {}, {"tuple": []}, {"data": ["float32", [], "AAAAAA=="]}, {"deque": [-1, []]},
           {"data": ["int64", [2], "AAAA"]}, {"piece": "model.0.weight"}, {"tensor": "model.0.weight"},
           {"bytes": "AAAA"}, {"dtype": "float32"}, {"complex": [1, 1]}, {"device": "cuda:9"}, {"set": [1, 1]}]
# (stage, dtype, optimizer): a small model of each, on one rank
CASES = [(None, torch.float32, "AdamW"), (STAGES[0], torch.float32, "AdamW"), (STAGES[2], torch.bfloat16, "AdamW"),
         (STAGES[3], torch.float32, "AdamW"), (STAGES[3], torch.bfloat16, "SGD"), (None, torch.float32, "Adagrad")]
OPTIONS = {"AdamW": {"fused": True, "amsgrad": True, "weight_decay": 0.1}, "Adagrad": {},
           "SGD": {"momentum": 0.9}}  # fused it can't step one that has momentum beside one that has none: torch's

KINDS = {}  # name -> function(chance, manifest, folder): changes the one, or files in the other, or returns bytes


def kind(function):
    KINDS[function.__name__.replace("_", " ")] = function
    return function


def places(value, path=()):
    """-> paths of all values in JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def parent_of(value, path):
    for key in path[:-1]:
        value = value[key]
    return value


def a_place(chance, manifest, where=None):
    """Each part of the manifest is as likely as another."""
    section = where or chance.choice(sorted(manifest))
    path = (section, *chance.choice(list(places(manifest[section]))))
    return parent_of(manifest, path), path[-1]


@kind
def another_value(chance, manifest, _):
    parent, key = a_place(chance, manifest)
    parent[key] = copy.deepcopy(chance.choice(STRANGE))


@kind
def an_entry_less(chance, manifest, _):
    parent, key = a_place(chance, manifest)
    del parent[key]


@kind
def two_that_changed_places(chance, manifest, _):
    path = chance.choice([path for path in places(manifest) if len(path) > 1])
    parent = parent_of(manifest, path)
    other = chance.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[path[-1]], parent[other] = parent[other], parent[path[-1]]


@kind
def states_that_changed_places(chance, manifest, _):
    one, other = chance.sample(sorted(manifest["states"]), 2)
    states = manifest["states"]
    if chance.random() < 0.5:
        states[one], states[other] = states[other], states[one]
    else:
        pairs = chance.choice(states[one]["dict"]), chance.choice(states[other]["dict"])
        pairs[0][1], pairs[1][1] = pairs[1][1], pairs[0][1]


@kind
def an_entry_of_a_state(chance, manifest, _):
    state = manifest["states"][chance.choice(sorted(manifest["states"]))]["dict"]
    pair = chance.choice(state)
    if chance.random() < 0.3:
        state.remove(pair)
        manifest["tensors"].pop(next(iter(pair[1].values())), None) if isinstance(pair[1], dict) \
            and isinstance(next(iter(pair[1].values())), str) else None
    elif chance.random() < 0.5:
        pair[0] = chance.choice(["step", "exp_avg", "momentum_buffer", "main_param", "mine", ""])
    else:
        pair[1] = copy.deepcopy(chance.choice(STRANGE))


@kind
def a_moment_of_another_shape(chance, manifest, folder):
    """Everything else is right: who claims its old bytes, and that there are new ones."""
    name = chance.choice(sorted(manifest["states"]))
    pairs = [pair for pair in manifest["states"][name]["dict"] if isinstance(pair[1], dict) and "piece" in pair[1]]
    if not pairs:
        return another_value(chance, manifest, folder)
    pair = chance.choice(pairs)
    key, old = pair[1]["piece"], "extra.0.old"
    entry = manifest["tensors"][old] = manifest["tensors"].pop(key)
    manifest["extra"][0]["dict"].append(["old", {"tensor": old}])
    lead, kind = chance.choice([[0], [1], [2], None, None]), chance.choice(["tensor", "piece"])
    shape = [*lead, *entry["shape"]] if lead else chance.choice([[1], [3], entry["shape"][::-1], [*entry["shape"], 2]])
    if lead is None and chance.random() < 0.5:
        pair[1] = {"data": ["float32", [chance.choice([1, 2])] if chance.random() < 0.5 else [], "AAAAAAAAAAA="[:8]]}
        return None
    numel = math.prod(shape)
    (folder / "own.bin").write_bytes(bytes(4 * numel))
    if numel:
        manifest["files"]["own.bin"] = {"bytes": 4 * numel, "crc32": 0}
    n_elements = numel // math.prod(lead) if lead and numel else numel
    manifest["tensors"][key] = {"dtype": "float32", "shape": shape, "n_lead": len(lead or []),
                                "ranges": [[0, n_elements, "own.bin", 0]] if numel else []}
    pair[1] = {kind: key}
    return None


@kind
def a_hyperparameter(chance, manifest, _):
    parent, key = a_place(chance, manifest, "groups")
    parent[key] = copy.deepcopy(chance.choice(STRANGE))


@kind
def a_tensor_of_another_shape(chance, manifest, folder):
    """Of one range, whose bytes are there, and with nothing beside: only the model knows better."""
    key = chance.choice(sorted(key for key, what in manifest["tensors"].items() if what["ranges"]))
    entry = manifest["tensors"][key]
    numel = max(1, chance.choice([1, 2, sum(r[1] - r[0] for r in entry["ranges"]) + chance.choice([-1, 0, 1, 16])]))
    name = f"own-{chance.randrange(10**9)}.bin"
    itemsize = manifests.DTYPES[entry["dtype"]].itemsize
    (folder / name).write_bytes(bytes(numel * itemsize))
    manifest["files"][name] = {"bytes": numel * itemsize, "crc32": 0}
    n_lead = chance.choice([0, 0, 1])
    entry.update(shape=[1] * n_lead + [numel], n_lead=n_lead, ranges=[[0, numel, name, 0]])
    for file in list(manifest["files"]):  # of what nothing is left none may be listed
        if not any(file == one[2] for what in manifest["tensors"].values() for one in what["ranges"]):
            manifest["files"].pop(file)


@kind
def a_tensor_of_another_dtype(chance, manifest, _):
    entry = manifest["tensors"][chance.choice(sorted(manifest["tensors"]))]
    size = manifests.DTYPES[entry["dtype"]].itemsize
    alike = [name for name, dtype in manifests.DTYPES.items() if dtype.itemsize == size]
    entry["dtype"] = chance.choice(alike if chance.random() < 0.7 else sorted(manifests.DTYPES))


@kind
def a_number_of_a_tensor(chance, manifest, _):
    entry = manifest["tensors"][chance.choice(sorted(manifest["tensors"]))]
    what = chance.choice(["n_lead", "shape", "ranges"])
    if what == "n_lead":
        entry["n_lead"] = chance.choice([0, 1, 2, 5])
    elif what == "shape":
        entry["shape"] = [*entry["shape"], chance.choice([0, 1, 2])] if chance.random() < 0.5 else entry["shape"][::-1]
    elif entry["ranges"]:
        one = chance.choice(entry["ranges"])
        place = chance.choice([0, 1, 3])
        one[place] += chance.choice([-4, -1, 1, 4, 64])


@kind
def bytes_of_a_file(chance, manifest, folder):
    """What is read is another model's, whatever its values are: it is loaded."""
    name = chance.choice(sorted(manifest["files"]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(chance.choice([1, 10, 1000])):
        content[chance.randrange(len(content))] = chance.randrange(256)
    (folder / name).write_bytes(content)


@kind
def another_file(chance, manifest, folder):
    path = folder / chance.choice([*sorted(manifest["files"]), "manifest.json"])
    content = path.read_bytes()
    path.unlink()
    chance.choice([lambda: None, path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"),
                   lambda: path.symlink_to(path), lambda: path.write_bytes(content[:-1]),
                   lambda: path.write_bytes(content + bytes(100)), lambda: path.write_bytes(b"")])()


@kind
def a_bit_of_the_manifest(chance, manifest, folder):
    content = bytearray((folder / "manifest.json").read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(content)


@kind
def noise_for_a_manifest(chance, manifest, folder):
    text = json.dumps(manifest).encode()
    start = chance.randrange(len(text))
    noise = chance.choice([b"[" * 10**5, b"\xff\xfe", b"9" * 5000, b'"' + b"\\u0000" * 9, b"NaN", b"{}", b"[],"])
    return sealed(text[:start] + noise + text[start:])


def sealed(text):
    return b'{"crc32": %d, %b' % (zlib.crc32(text), text[1:]) if text[:1] == b"{" else text


def mutate(chance, name, folder):
    """Changes the checkpoint in `folder`, and makes its checksums right."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_bytes())
    del manifest["crc32"]
    text = KINDS[name](chance, manifest, folder)
    for written in [*manifest["files"]] if isinstance(manifest.get("files"), dict) else ():
        path, what = folder / str(written)[:200], manifest["files"][written]
        if "/" not in str(written) and path.is_file() and not path.is_symlink() and isinstance(what, dict):
            what["crc32"] = zlib.crc32(path.read_bytes()) if what.get("crc32") is not None else None
    if file.is_file() and not file.is_symlink():
        file.write_bytes(text or manifests.sealed(manifest))


# ---------------------------------------------------------------------------------------------------------- one of them


def made(case, seed):
    stage, dtype, name = case
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(11, 21), torch.nn.Tanh(), torch.nn.Linear(21, 11)).to(dtype)
    cls, options = getattr(torch.optim, name), {"lr": 0.01, **OPTIONS[name]}
    if stage is None:
        return model, cls(model.parameters(), **options)
    return model, optimizer_of(stage)(model.parameters(), cls, **options)


def step(model, optimizer):
    model(torch.ones(2, 11, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_one(case, folder):
    model, optimizer = made(case, 0)
    for _ in range(2):
        step(model, optimizer)
    extra = {"step": 2, "average": torch.arange(40.0), "text": "abc", "pair": (1, [2.5, None])}
    checkpoint.save(folder, model, optimizer, extra)


def state_of(model, optimizer):
    full = checkpoint.full_state_dict(optimizer, to_all=True)
    return {**model.state_dict(), **{(index, key): value for index, state in full["state"].items()
                                     for key, value in state.items()}, "groups": str(full["param_groups"])}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items())


def outcome(case, folder, scratch):
    """-> "refused", "loaded", or what is wrong."""
    model, optimizer = made(case, 1)
    step(model, optimizer)
    before = copy.deepcopy(state_of(model, optimizer))
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        checkpoint.load(folder, model, optimizer)
        answer = "loaded"
    except checkpoint.CheckpointError as refusal:
        answer = "refused" if same(before, state_of(model, optimizer)) else f"changed before it was refused: {refusal}"
        if not str(refusal).isprintable():
            answer = f"a line that can't be printed: {refusal!r}"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    if time.process_time() - began > LONGEST_S:
        answer = f"{answer}, after {time.process_time() - began:.0f} s"
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory > MOST_KB:
        answer = f"{answer}, with more than {MOST_KB // 1024} MB"
    try:
        step(model, optimizer)
        checkpoint.save(scratch / "again", model, optimizer)
    except Exception as error:
        answer = f"{answer}; then {type(error).__name__}: {error}"
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


def one_mutation(number, seed, folder):
    """-> kind, outcome."""
    chance = random.Random(f"{seed} {number}")
    name = sorted(KINDS)[number % len(KINDS)]
    case = CASES[number // len(KINDS) % len(CASES)]
    original, mutated = folder / f"original-{CASES.index(case)}", folder / "mutated"
    if not original.exists():
        save_one(case, original)
    for path in (mutated, folder / "again"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(original, mutated)
    mutate(chance, name, mutated)
    return name, outcome(case, mutated, folder)


def work(connection, seed, numbers, folder):
    """In a process of its own, which may die."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen = watch(folder)
    for number in numbers:
        name, answer = one_mutation(number, seed, folder)
        if answer == "loaded" and name == "a bit of the manifest":
            answer = "loaded, with another value"
        connection.send((number, name, f"{answer}; {seen.pop()}" if seen else answer))
    dist.destroy_process_group()


def run(number, seed=0, say=lambda line: None):
    """-> kind -> Counter of "refused", "loaded" and "wrong"; and a line for each that is wrong."""
    table, wrong, done = collections.defaultdict(collections.Counter), [], 0
    context = multiprocessing.get_context("spawn")
    while done < number:
        with tempfile.TemporaryDirectory() as folder:
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, seed, range(done, number), Path(folder).resolve()))
            process.start()
            there.close()
            try:
                while done < number:
                    done, name, answer = here.recv()
                    done += 1
                    table[name][answer if answer in ("refused", "loaded") else "wrong"] += 1
                    if answer not in ("refused", "loaded"):
                        wrong.append(f"{done - 1} {name}: {answer[:500]}")
                        say(wrong[-1])
            except EOFError:  # it has died
                process.join()
                name = sorted(KINDS)[done % len(KINDS)]
                table[name]["wrong"] += 1
                wrong.append(f"{done} {name}: the process ended with {process.exitcode}")
                say(wrong[-1])
                done += 1
            process.join()
    return dict(table), wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    table, wrong = run(args.number, args.seed, say=print)
    for name in sorted(table):
        print(f"{name:32} {sum(table[name].values()):5} tried {table[name]['refused']:5} refused "
              f"{table[name]['loaded']:5} loaded, stepped and saved {table[name]['wrong']:5} wrong")
    if args.json:
        rows = [MutationRow(name, *(table[name][key] for key in ("refused", "loaded", "wrong")))
                for name in sorted(table)]
        result = MutationResult(args.number, args.seed, torch.__version__, date.today().isoformat(), rows)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(results.to_json(result))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
