"""What all ranks hold, as the frames of a recording go by."""


class Memory:
    """Attributes:
        cells: storage -> (value, kind, element, origin) of each of its cells; None when it has been released.
        at: rank -> stack.
    """

    def __init__(self, recording, last=-1):
        """As it is after frame `last`."""
        self.recording, self.cells, self.at = recording, {}, {}
        self.params = [index for index, numel in enumerate(recording["params"]) for _ in range(numel)]
        for frame in recording["frames"][: last + 1]:
            self.take(frame)

    def take(self, frame):
        """-> the storages in which something has changed."""
        for storage, cells in frame["memory"]:
            self.cells[storage] = cells and [tuple(self.recording["cells"][number]) for number in cells]
        self.at.update(map(tuple, frame["at"]))
        return {storage for storage, _ in frame["memory"]}

    def rows(self):
        """-> {row: {rank: storages, by part}}, in the order in which they came."""
        rows, storages = {}, self.recording["storages"]
        for number, storage in enumerate(storages):
            rows.setdefault(storage["row"], {}).setdefault(storage["rank"], []).append(number)
        for numbers in (numbers for ranks in rows.values() for numbers in ranks.values()):
            numbers.sort(key=lambda number: int("0" + "".join(filter(str.isdecimal, storages[number]["part"]))))
        return rows

    def place(self, rank):
        """-> (function, file, line, text) of the line at which a rank is."""
        function, line = self.recording["stacks"][self.at[rank]][-1]
        name, file, *_ = self.recording["functions"][function]
        title, source = self.recording["files"][file]
        return name, title, line, source.splitlines()[line - 1].strip()
