"""Where cells are drawn, on the page and in scenes: below each other what lies in the same memory, or is the same."""

from .frames import Memory

FLOW = 18  # cells of a line, where nothing else says how many are side by side


def places(recording):
    """Return for each storage the place of each of its cells: [column, line]."""
    homes, of_storages = homes_of_elements(recording), []
    for storage in recording["storages"]:
        row = storage["row"]
        numel = storage["numel"]
        number = part_number(storage)
        before = {part_number(other): other for other in recording["storages"]
                  if (other["rank"], other["row"]) == (storage["rank"], row) and part_number(other) < number}.values()
        if row == "BucketBuffer.sent":  # a line: its columns aren't those of buckets
            of_storages.append([[column, number] for column in range(numel)])
        elif storage["shards"]:
            left = sum(sum(other["shards"]) + 1 for other in before)
            of_storages.append([[left + column, line] for column, line in grid(storage["shards"], recording["ranks"])])
        elif row in ("parameters", "gradients") or numel == len(homes):
            first = sum(recording["params"][:number])
            of_storages.append([homes[first + element] for element in range(numel)])
        else:
            left = sum(other["numel"] for other in before)
            width = len(homes) // recording["ranks"] if is_replicated(recording) else FLOW
            of_storages.append([[(left + cell) % width, (left + cell) // width] for cell in range(numel)])
    return of_storages


def is_replicated(recording):
    return set(recording["owners"]) == {-1}


def part_number(storage):
    return int("0" + "".join(filter(str.isdecimal, storage["part"])))


def homes_of_elements(recording):
    """Return the place of each element: in its bucket, in its shard, or in the line of its tensor."""
    numel, homes = sum(recording["params"]), {}
    for number, storage in enumerate(recording["storages"]):
        in_grid = grid(storage["shards"], recording["ranks"])
        if storage["row"] == "ParameterBuffer.flat":
            cells = Memory(recording, 0).cells[number]
            return {element: place for (_, _, element, _), place in zip(cells, in_grid) if element is not None}
        if storage["row"] == "GradBuffer.flat":
            return dict(enumerate(in_grid))
    if is_replicated(recording):  # line r is what rank r averages in the first half of the all-reduce
        width = numel // recording["ranks"]
        return {element: [element % width, element // width] for element in range(numel)}
    for line, length in enumerate(recording["params"]):
        homes |= {element: [column, line] for column, element in enumerate(range(len(homes), len(homes) + length))}
    return homes


def grid(shards, n_ranks):
    """Return the place of each cell of buckets side by side, where each has a line for each rank."""
    lefts = [sum(shards[:bucket]) for bucket in range(len(shards))]
    return [[left + index % width, index // width] for left, width in zip(lefts, shards)
            for index in range(width * n_ranks)]
