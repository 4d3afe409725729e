"""Where cells are drawn, on the page and in scenes: below each other what lies in the same memory, or is the same."""

from .frames import Memory

FLOW, FLOW_OF_PARAMS = 18, 16  # cells of a line, where nothing else says how many are side by side
MAX_BY_TENSOR = 32  # elements of a model whose tensors have a line each


def places(recording):
    """Return for each storage the place of each of its cells: [column, line]."""
    homes, storages, width = homes_of_elements(recording), recording["storages"], width_of(recording)
    made = []
    for storage in storages:
        row, numel = storage["row"], storage["numel"]
        parts = {other["part"]: other for other in storages if (other["rank"], other["row"]) == (storage["rank"], row)}
        before = [other for other in parts.values() if part_number(other) < part_number(storage)]
        if storage["shards"]:
            left = sum(sum(other["shards"]) + 1 for other in before)
            made.append([[left + column, line] for column, line in grid(storage["shards"], recording["ranks"])])
        elif row in ("parameters", "gradients") or numel == len(homes):
            first = sum(recording["params"][: part_number(storage)])
            made.append([homes[first + element] for element in range(numel)])
        else:
            left = sum(other["numel"] for other in before)
            made.append([[(left + cell) % width, (left + cell) // width] for cell in range(numel)])
    return made


def width_of(recording):
    """Return how many cells are side by side where nothing else says so: few where nothing is sharded."""
    is_small = sum(recording["params"]) <= MAX_BY_TENSOR
    return recording["ranks"] if is_small and set(recording["owners"]) == {-1} else FLOW


def part_number(storage):
    return int("0" + "".join(filter(str.isdecimal, storage["part"])))


def homes_of_elements(recording):
    """Return the place of each element: in its bucket, in its shard, in the line of its tensor, or in the flow."""
    numel, homes = sum(recording["params"]), {}
    for number, storage in enumerate(recording["storages"]):
        in_grid = grid(storage["shards"], recording["ranks"])
        if storage["row"] == "ParameterBuffer.flat":
            cells = Memory(recording, 0).cells[number]
            return {element: place for (_, _, element, _), place in zip(cells, in_grid) if element is not None}
        if storage["row"] == "GradBuffer.flat":
            return dict(enumerate(in_grid))
    if numel > MAX_BY_TENSOR or set(recording["owners"]) == {-1}:
        width = min(width_of(recording), FLOW_OF_PARAMS)
        return {element: [element % width, element // width] for element in range(numel)}
    for line, length in enumerate(recording["params"]):
        homes |= {element: [column, line] for column, element in enumerate(range(len(homes), len(homes) + length))}
    return homes


def grid(shards, n_ranks):
    """Return the place of each cell of buckets side by side, where each has a line for each rank."""
    lefts = [sum(shards[:bucket]) for bucket in range(len(shards))]
    return [[left + index % width, index // width] for left, width in zip(lefts, shards)
            for index in range(width * n_ranks)]
