"""What all ranks hold, as the frames of a recording go by."""


class Memory:
    """After `take`: cells, storage -> [value, label of each]; gone, storages that were released; at, rank -> stack."""

    def __init__(self, recording):
        self.recording, self.cells, self.gone, self.at = recording, {}, set(), {}
        self.params = [index for index, numel in enumerate(recording["params"]) for _ in range(numel)]

    def take(self, frame):
        """-> the storages in which something has changed."""
        for storage, start, values, labels in frame["cells"]:
            if storage in self.gone or storage not in self.cells:
                self.cells[storage] = []
                self.gone.discard(storage)
            self.cells[storage][start : start + len(values)] = list(zip(values, labels))
        self.gone.update(frame["gone"])
        self.at.update(map(tuple, frame["at"]))
        return {storage for storage, *_ in frame["cells"]} | set(frame["gone"])

    def label(self, storage, cell):
        """-> kind, element, origin."""
        return self.recording["labels"][self.cells[storage][cell][1]]

    def kind(self, storage, cell):
        return "freed" if storage in self.gone else self.label(storage, cell)[0]

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
