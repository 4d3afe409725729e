"""Where cells are drawn, on the page and in scenes: below each other what lies in the same memory, or is the same."""

from .frames import memory_after

IN_SHARDS = ("GradBuffer.flat", "ParameterBuffer.flat", "sync_params: gathered")  # rows with a line for each rank


def places(recording):
    """Return for each storage the place of each of its cells: [column, line]."""
    homes = homes_of_elements(recording)
    return [places_in(storage, recording, homes) for storage in recording["storages"]]


def places_in(storage, recording, homes):
    numel = storage["numel"]
    part = storage["part"]
    if storage["row"] == "BucketBuffer.sent":  # a line: its columns aren't those of buckets
        return [[column, int(part)] for column in range(numel)]
    if storage["row"] in IN_SHARDS:
        return grid(storage, recording)
    if storage["row"] in ("parameters", "gradients"):
        first = sum(recording["params"][: int(part.removeprefix("p"))])
        return [homes[element] for element in range(first, first + numel)]
    if numel == len(homes):
        return [homes[element] for element in range(numel)]
    parts_before = {other["part"]: other["numel"] for other in recording["storages"] if other["part"] < part
                    and (other["rank"], other["row"]) == (storage["rank"], storage["row"])}
    left = sum(parts_before.values())
    return in_lines(range(left, left + numel), recording)


def homes_of_elements(recording):
    """Return the place of each element: in its bucket, in its shard, or in the line of its tensor."""
    for number, storage in enumerate(recording["storages"]):
        if storage["row"] in ("ParameterBuffer.flat", "GradBuffer.flat"):
            cells = memory_after(recording, 0)[number]
            return {cell.element: place for cell, place in zip(cells, grid(storage, recording))}
    places = []
    for line, length in enumerate(recording["params"]):
        places += [[column, line] for column in range(length)]
    if is_replicated(recording):
        places = in_lines(range(len(places)), recording)
    return dict(enumerate(places))


def in_lines(cells, recording):
    """Return the place of each cell. In replicated training line r is what rank r averages; else there is one line."""
    width = sum(recording["params"])
    if is_replicated(recording):
        width //= recording["ranks"]
    return [[cell % width, cell // width] for cell in cells]


def is_replicated(recording):
    return set(recording["owners"]) == {-1}


def grid(storage, recording):
    """Return the place of each cell of buckets side by side, where each has a line for each rank.

    Stage 4's buckets are all as long as a bucket buffer; elsewhere all memory is one bucket.
    """
    bucket_numels = [other["numel"] for other in recording["storages"] if other["row"] == "BucketBuffer.sent"]
    bucket_numel = bucket_numels[0] if bucket_numels else storage["numel"]
    width = bucket_numel // recording["ranks"]
    places = []
    for cell in range(storage["numel"]):
        bucket, cell_of_bucket = divmod(cell, bucket_numel)
        line, column = divmod(cell_of_bucket, width)
        places.append([bucket * width + column, line])
    return places
