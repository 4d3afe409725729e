"""The format before this one, which loads as ever; nothing writes it. Only this file knows of it.

Each rank wrote files of torch.distributed.checkpoint, zip archives in which tensors lie uncompressed, and beside them
its pickled `.metadata`, which was never read. The manifest says where the bytes of each tensor are, in as many ranges
as torch stored boxes, and the same of everything else as it does now; it has no checksum of itself.
"""

FORMAT = 1
LARGEST_GAP = 2**24  # bytes: torch's `.metadata`, and what zip archives have besides


def is_format_1(raw) -> bool:
    """Of the JSON of a manifest."""
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def upgraded(raw) -> dict:
    """As the next format says it."""
    return {**raw, "format": FORMAT + 1}
