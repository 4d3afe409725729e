"""Tells where each cell of a recording is drawn, on the page docs/watch.html and in the chapters' pictures.

A recording (show/frames.py) has the memory of each rank in storages, which consist of cells of one number each. A cell
may hold the value of an element: elements of all parameters are counted from 0. A storage has a `row`, the name that is
drawn above its cells: a class and its attribute, or a function and its local variable, of the optimizer that is shown.

Cells are drawn in lines within a row. A place is [column, line] of a cell, both counted from 0, in the row of one rank.
Cells of the same element, or of the same memory at different times, lie below each other: they have the same column.

Stages 3 and 4 of this project (folders stage*/) have all elements in a flat buffer. A bucket is a part of the buffer
that is sent at once: stage 4 has several buckets, and stage 3's whole buffer is one bucket. Each bucket consists of a
shard for each rank, which has the elements that the rank updates.
"""

from .frames import memory_after

FLAT_ROWS = ("ParameterBuffer.flat", "GradBuffer.flat")  # rows of flat buffers, which exist from the start
IN_SHARDS = (*FLAT_ROWS, "sync_params: gathered")  # rows in which each line is the shard of a rank


def with_places(recording):
    """Return the recording, where each storage also has `places`: the place of each of its cells."""
    homes = homes_of_elements(recording)
    storages = [storage | {"places": places_in(storage, recording, homes)} for storage in recording["storages"]]
    return recording | {"storages": storages}


def places_in(storage, recording, homes):
    """Return the places of the cells of a storage. homes: see `homes_of_elements`."""
    numel = storage["numel"]
    part = storage["part"]  # tells the storages of a row apart
    if storage["row"] == "BucketBuffer.sent":  # several buffers that hold any bucket in turn: a line for each buffer
        return [[column, int(part)] for column in range(numel)]
    if storage["row"] in IN_SHARDS:
        return grid(storage, recording)
    if storage["row"] in ("parameters", "gradients"):  # `part` is "p0" for parameter 0 or its gradient
        index = int(part.removeprefix("p"))
        if numel == recording["params"][index]:  # else the reader's own optimizer has put several into one buffer
            first = sum(recording["params"][:index])
            return [homes[element] for element in range(first, first + numel)]
    if numel == len(homes):  # a cell for each element
        return [homes[element] for element in range(numel)]
    # Otherwise the storages of a row are drawn one behind the other. Two storages with the same part, at different
    # times, are in the same place.
    numel_of_part = {other["part"]: other["numel"] for other in recording["storages"] if other["part"] < part
                     and (other["rank"], other["row"]) == (storage["rank"], storage["row"])}
    first = sum(numel_of_part.values())
    return in_lines(range(first, first + numel), recording)


def homes_of_elements(recording):
    """Return {element: place}: the home of an element is the place at which its parameter and gradient are drawn.

    If there is a flat buffer, it is the place of the element there. Otherwise each parameter has a line of its own, but
    replicated training has the lines of `in_lines`.
    """
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
    """Return the place of each of some cells, where all elements of the model have one line.

    In replicated training they have a line for each rank: in the first half of an all-reduce rank r averages line r.
    """
    width = sum(recording["params"])
    if is_replicated(recording):
        width //= recording["ranks"]
    return [[cell % width, cell // width] for cell in cells]


def is_replicated(recording):
    """Return whether every rank updates all elements, as with DDP."""
    return set(recording["owners"]) == {-1}


def grid(storage, recording):
    """Return the place of each cell of a flat buffer: buckets lie side by side, and each has a line for each shard.

    A BucketBuffer is as long as each of the buckets. Only stage 4 has it: elsewhere the whole storage is one bucket.
    """
    bucket_numel = storage["numel"]
    for other in recording["storages"]:
        if other["row"] == "BucketBuffer.sent":
            bucket_numel = other["numel"]
    width = max(1, bucket_numel // recording["ranks"])  # of a bucket, in cells
    places = []
    for cell in range(storage["numel"]):
        bucket, cell_of_bucket = divmod(cell, bucket_numel)
        line, column = divmod(cell_of_bucket, width)
        places.append([bucket * width + column, line])
    return places
