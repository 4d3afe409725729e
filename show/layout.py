"""Chooses where each cell of a recording is drawn, on the page docs/watch.html and in the chapters' pictures.

A recording (show/frames.py) has the memory of each rank in storages. A storage consists of cells, of one number each. A
cell may hold an element of a parameter: elements of all parameters are counted from 0. Two texts name a storage:

    row     what is written at its cells: "parameters", "gradients", or a name from the optimizer that is shown (a class
            and its attribute, or a function and its local variable)
    part    tells storages of the same row apart: "p0" for parameter 0 or its gradient, otherwise the number of an
            object, such as "1", or ""

The cells of a row form a grid for each rank. A place is [column, line] of a cell in this grid, both counted from 0. A
column has the same element in every row, or the same memory at different times.

Stages 3 and 4 of this project (folders stage*/) have all elements in a flat buffer. A bucket is a part of the buffer
that is sent at once: stage 4 has several buckets, and stage 3's whole buffer is one bucket. A bucket has a shard for
each rank, with the elements that the rank updates.
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
    part = storage["part"]
    # Stage 4 has several such buffers, and `part` is the number of the buffer. Each holds any bucket in turn.
    if storage["row"] == "BucketBuffer.sent":
        return [[column, int(part)] for column in range(numel)]
    if storage["row"] in IN_SHARDS:
        return grid(storage, recording)
    if storage["row"] in ("parameters", "gradients"):
        index = int(part.removeprefix("p"))
        # Another optimizer than this project's may have several parameters in one storage.
        if numel == recording["params"][index]:
            first = sum(recording["params"][:index])
            return [homes[element] for element in range(first, first + numel)]
    if numel == len(homes):  # a cell for each element
        return [homes[element] for element in range(numel)]
    # Otherwise the parts of a row are drawn one behind the other. Two storages may have the same part, at different
    # times: they are drawn in the same place, so their part counts once.
    numel_of_part = {}  # of the parts before this part
    row_of_rank = storage["rank"], storage["row"]
    for other in recording["storages"]:
        if (other["rank"], other["row"]) == row_of_rank and other["part"] < part:
            numel_of_part[other["part"]] = other["numel"]
    first = sum(numel_of_part.values())
    return in_lines(range(first, first + numel), recording)


def homes_of_elements(recording):
    """Return {element: place}. The place is the home of the element: its parameter and gradient are drawn there.

    If there is a flat buffer, the home is the element's place in the buffer. In replicated training it is the place
    that `in_lines` returns. Otherwise each parameter has a line of its own.
    """
    n_elements = sum(recording["params"])
    for number, cells in memory_after(recording, 0).items():  # {index of a storage: its Cells} at the start
        storage = recording["storages"][number]
        if storage["row"] in FLAT_ROWS:
            homes = {cell.element: place for cell, place in zip(cells, grid(storage, recording))}
            # The buffer has all elements, and perhaps padding, whose element is None.
            if homes.keys() >= set(range(n_elements)):
                return homes
    if is_replicated(recording):
        return dict(enumerate(in_lines(range(n_elements), recording)))
    places = []
    for line, length in enumerate(recording["params"]):
        places += [[column, line] for column in range(length)]
    return dict(enumerate(places))


def in_lines(indices, recording):
    """Return the places of cells that are drawn from left to right. A line is as long as the model has elements.

    In replicated training the elements have a line for each rank, because in the first half of an all-reduce rank r
    averages line r. indices: the numbers of the cells, counted through the row.
    """
    width = sum(recording["params"])
    if is_replicated(recording):
        width //= recording["ranks"]
    return [[index % width, index // width] for index in indices]


def is_replicated(recording):
    """Return whether every rank updates all elements, as with DDP. The owner of an element is -1 then."""
    return set(recording["owners"]) == {-1}


def grid(storage, recording):
    """Return the places of a flat buffer's cells. Buckets lie side by side, and a bucket has a line for each shard.

    A BucketBuffer is as long as each bucket. Only stage 4 has it: elsewhere the whole storage is one bucket.
    """
    bucket_numel = storage["numel"]
    for other in recording["storages"]:
        if other["row"] == "BucketBuffer.sent":
            bucket_numel = other["numel"]
    width = max(1, bucket_numel // recording["ranks"])  # of a bucket, in cells
    places = []
    for index in range(storage["numel"]):
        bucket, index_in_bucket = divmod(index, bucket_numel)
        line, column = divmod(index_in_bucket, width)
        places.append([bucket * width + column, line])
    return places
