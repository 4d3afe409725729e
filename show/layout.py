"""Places cells on the page and in scenes: below each other are cells of the same memory, or of the same element.

A place is [column, line], counted from 0 in a row of one rank.
"""

from .frames import memory_after

FLAT_ROWS = ("ParameterBuffer.flat", "GradBuffer.flat")  # rows in which each element has a place, from the first frame
IN_SHARDS = (*FLAT_ROWS, "sync_params: gathered")  # rows with a line for each rank


def with_places(recording):
    """Return the recording, with `places` in each storage: the place of each of its cells."""
    homes = homes_of_elements(recording)
    storages = [storage | {"places": places_in(storage, recording, homes)} for storage in recording["storages"]]
    return recording | {"storages": storages}


def places_in(storage, recording, homes):
    """Return the places of the cells of a storage. homes: the place of each element."""
    numel = storage["numel"]
    part = storage["part"]
    if storage["row"] == "BucketBuffer.sent":  # a line for each buffer: its columns aren't those of buckets
        return [[column, int(part)] for column in range(numel)]
    if storage["row"] in IN_SHARDS:
        return grid(storage, recording)
    if storage["row"] in ("parameters", "gradients"):
        index = int(part.removeprefix("p"))
        if numel == recording["params"][index]:  # else a package of the reader's own has them in one buffer
            first = sum(recording["params"][:index])
            return [homes[element] for element in range(first, first + numel)]
    if numel == len(homes):
        return [homes[element] for element in range(numel)]
    numel_of_part = {other["part"]: other["numel"] for other in recording["storages"] if other["part"] < part
                     and (other["rank"], other["row"]) == (storage["rank"], storage["row"])}
    first = sum(numel_of_part.values())
    return in_lines(range(first, first + numel), recording)


def homes_of_elements(recording):
    """Return {element: place}: in the bucket and shard of the element, or else in the line of its tensor."""
    n_elements = sum(recording["params"])
    for number, cells in memory_after(recording, 0).items():
        storage = recording["storages"][number]
        if storage["row"] in FLAT_ROWS:
            homes = {cell.element: place for cell, place in zip(cells, grid(storage, recording))}
            if homes.keys() >= set(range(n_elements)):
                return homes
    if is_replicated(recording):
        return dict(enumerate(in_lines(range(n_elements), recording)))
    places = []
    for line, length in enumerate(recording["params"]):
        places += [[column, line] for column in range(length)]
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
    bucket_numel = storage["numel"]
    for other in recording["storages"]:
        if other["row"] == "BucketBuffer.sent":
            bucket_numel = other["numel"]
    width = max(1, bucket_numel // recording["ranks"])
    places = []
    for cell in range(storage["numel"]):
        bucket, cell_of_bucket = divmod(cell, bucket_numel)
        line, column = divmod(cell_of_bucket, width)
        places.append([bucket * width + column, line])
    return places
