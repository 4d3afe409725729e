"""Converts values to JSON and back, without pickle, so that no code in a checkpoint can run.

A value that JSON doesn't have becomes a dict of one entry, whose key is its type: {"tuple": [1, 2]}. A small tensor is
{"data": […]}; what stands for a larger one, such as the key of bytes in a file, is the caller's.
"""

import base64
import collections
import math
import numbers
from collections.abc import Callable

import torch

NAMES = ("float64 float32 float16 bfloat16 complex64 complex128 bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 "
         "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz")
CODES = "F64 F32 F16 BF16 C64 C128 BOOL U8 I8 I16 I32 I64 U16 U32 U64 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ"
DTYPES = {name: getattr(torch, name) for name in NAMES.split()}
DTYPE_OF_CODE = dict(zip(CODES.split(), DTYPES.values(), strict=True))  # as safetensors calls them
DICTS = {"dict": dict, "ordered": collections.OrderedDict}
PLAIN = bool, int, float, str, type(None)
SMALL = 16  # elements of a tensor that is written into the JSON itself
DEEPEST = 50  # containers in each other


class NotPackable(ValueError):
    """Something that a checkpoint can't hold; `path`: where in the value it is."""

    def __init__(self, value, path, reason=None):
        kind = type(value)
        super().__init__(reason or f"it holds {kind.__module__}.{kind.__qualname__}")
        self.path = path_of(path)


def name_of(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_text(content) -> str:
    return base64.b64encode(content).decode()


def from_text(text) -> bytes:
    return base64.b64decode(text, validate=True)


# class -> its word, what stands for a value in JSON, and the value again
KINDS = {
    tuple: ("tuple", list, tuple), torch.Size: ("size", list, torch.Size), set: ("set", list, set),
    frozenset: ("frozenset", list, frozenset), bytes: ("bytes", to_text, from_text),
    bytearray: ("bytearray", to_text, lambda text: bytearray(from_text(text))),
    complex: ("complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    torch.dtype: ("dtype", name_of, DTYPES.__getitem__), torch.device: ("device", str, torch.device),
}
BACK = {word: back for word, _, back in KINDS.values()}


def pack(value, tensor: Callable | None, path=()):
    """-> `value` as JSON can hold it, or NotPackable. `tensor(path, tensor)` -> what stands for one."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if len(path) > DEEPEST:
        raise NotPackable(value, path, f"it is nested deeper than {DEEPEST}")
    if tensor and isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in DTYPES.values():
        return tensor(path, value)
    if kind is list:
        return [pack(item, tensor, (*path, i)) for i, item in enumerate(value)]
    if kind is collections.deque:
        return {"deque": [value.maxlen, pack(list(value), tensor, path)]}
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        name = "ordered" if kind is collections.OrderedDict else "dict"
        return {name: [[pack(key, None, (*path, key)), pack(item, tensor, (*path, key))]
                       for key, item in value.items()]}
    if kind in KINDS:
        word, stands_for_it, _ = KINDS[kind]
        return {word: pack(stands_for_it(value), tensor, path)}
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # NumPy's, which a schedule may leave
        return pack(value.item(), None, path)
    raise NotPackable(value, path)


def pack_apart(value, prefix="", small=-1):
    """-> `value` packed, with {"tensor": key} for each tensor of more than `small` elements; key -> tensor."""
    apart = {}

    def tensor(path, its):
        if its.numel() <= small:
            return pack_data(path, its)
        key = prefix + path_of(path)
        if key in apart:
            raise NotPackable(its, path, "two of its keys read alike")  # {1: …, "1": …}
        apart[key] = its
        return {"tensor": key}

    return pack(value, tensor), apart


def path_of(path) -> str:
    return ".".join(map(str, path))


def unpack(packed, tensor: Callable, depth=0):
    """-> the value that was packed. `tensor(name, what)` -> the tensor for {name: what}, unless its data is there.
    `depth`: of containers around it. Raises KeyError, TypeError or ValueError: `packed` can't come from `pack`."""
    if type(packed) in PLAIN:
        return packed
    need(depth <= DEEPEST, f"values nested deeper than {DEEPEST}")
    if isinstance(packed, list):
        return [unpack(item, tensor, depth + 1) for item in packed]
    need(isinstance(packed, dict) and len(packed) == 1, "a value of no known kind")
    ((name, what),) = packed.items()
    if name in DICTS:
        return DICTS[name]((unpack(key, tensor, depth + 1), unpack(item, tensor, depth + 1)) for key, item in what)
    if name == "deque":
        maxlen, items = what
        return collections.deque(unpack(items, tensor, depth), maxlen)
    if name == "data":
        return unpack_data(*what)
    return BACK[name](unpack(what, tensor, depth)) if name in BACK else tensor(name, what)


def pack_data(_, tensor) -> dict:
    """-> a small tensor packed with its data; for `pack`."""
    tensor = tensor.detach().cpu().contiguous()
    return {"data": [name_of(tensor.dtype), list(tensor.shape), to_text(bytes_of(tensor))]}


def unpack_data(name, shape, text) -> torch.Tensor:
    content, dtype, shape = bytearray(from_text(text)), DTYPES[name], checked_shape(shape)
    need(len(content) == math.prod(shape) * dtype.itemsize,
         f"{len(content)} bytes for a tensor of shape {tuple(shape)} and {dtype}")
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(content, dtype=torch.uint8)
    return (flat.ne(0) if dtype is torch.bool else flat.view(dtype)).view(shape)  # a byte of 2 is no bool


def bytes_of(tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    # Through another storage, because numpy() makes its tensor's storage impossible to resize, as remainder16 does.
    return memoryview(torch.from_dlpack(tensor.detach().reshape(-1).view(torch.uint8)).numpy())


def need(condition, what):
    """Raise ValueError unless `condition`; `damage_of` turns it into a DamagedCheckpoint."""
    if not condition:
        raise ValueError(what)


def without_doubles(pairs):
    """For json.loads: refuse duplicate keys, of which json would drop all but one."""
    found = dict(pairs)
    need(len(found) == len(pairs), "a key comes twice")
    return found


def checked_shape(shape) -> torch.Size:
    """Raises ValueError unless `shape` is a list of sizes with at most 2**60 elements in all."""
    need(isinstance(shape, list) and all(map(is_count, shape)), f"a shape of {str(shape)[:40]}")
    need(len(shape) <= 64 and math.prod(n for n in shape if n) <= 2**60, "a shape of too many elements")
    return torch.Size(shape)


def is_count(value):
    return type(value) is int and value >= 0
