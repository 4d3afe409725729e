"""A checkpoint as one file, for a program without this package. Nothing in the folder is unpickled."""

import collections

import torch

from .manifest import manifest_of, read, verify
from .json_values import unpack
from .reading import TensorsOf


def convert(folder, path) -> dict:
    """Write what `converted` returns to a new file, for torch.load(weights_only=True). -> the same."""
    found = converted(folder)
    with open(path, "xb") as file:
        torch.save(found, file)
    return found


def converted(folder) -> dict:
    """A checkpoint in one dict, on the CPU. Raises OSError or ValueError: it is damaged, or none."""
    manifest, _ = manifest_of(folder)
    verify(folder, manifest)
    tensors = TensorsOf(folder, manifest)
    stored = {name: manifest.tensors[f"model.{name}"] for name in manifest.model}
    groups = [{**unpack(group["options"], tensors), "params": group["params"]} for group in manifest.groups]
    states = {name: without_deques(unpack(state, tensors)) for name, state in manifest.states.items()}
    return {"model": {name: read(folder, one).reshape(one.shape) for name, one in stored.items()},
            "optimizer": {"state": states, "param_groups": groups},
            "extra": [without_deques(unpack(extra, tensors)) for extra in manifest.extra]}


def without_deques(value):
    """Lists in their place: torch.load(weights_only=True) knows no deques."""
    if isinstance(value, dict):
        return type(value)((key, without_deques(item)) for key, item in value.items())
    if isinstance(value, (list, collections.deque)):
        return [without_deques(item) for item in value]
    return tuple(map(without_deques, value)) if type(value) is tuple else value
