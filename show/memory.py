"""What all ranks hold, as the frames of a recording go by."""

NOTHING = ("zero", "padding", "unset")  # what these hold isn't garbage


class Memory:
    """What all ranks hold, as frames go by."""

    def __init__(self, recording):
        self.recording, self.cells, self.dead, self.gone, self.at = recording, {}, {}, set(), {}
        self.step = 0

    def take(self, frame):
        """-> the storages in which something has changed."""
        changed, self.step = set(), frame["step"]
        for storage, start, values, labels in frame["cells"]:
            if storage in self.gone or storage not in self.cells:
                self.cells[storage] = []
                self.gone.discard(storage)
            self.cells[storage][start : start + len(values)] = list(zip(values, labels))
            changed.add(storage)
        self.dead.update((storage, set(cells)) for storage, cells in frame["dead"])
        self.gone.update(frame["gone"])
        self.at.update(map(tuple, frame["at"]))
        return changed | set(frame["gone"])

    def kind(self, storage, cell):
        """What a cell is to a reader: the kind of its label, or garbage, freed; of parameters old, new, stale."""
        recording = self.recording
        kind, _, origin = recording["labels"][self.cells[storage][cell][1]]
        if storage in self.gone:
            return "freed"
        if cell in self.dead.get(storage, ()) and kind not in NOTHING:
            return "garbage"
        if kind != "parameter":
            return kind
        n_steps = max(frame["step"] for frame in recording["frames"])
        return "stale" if origin < self.step else "new" if origin > min(self.step, n_steps - 1) else "old"

    def owner(self, storage, cell):
        """-> the rank that steps the element in a cell; -1 where that is every rank, or none."""
        element = self.recording["labels"][self.cells[storage][cell][1]][1]
        return -1 if element is None else self.recording["owners"][element]

    def param(self, storage, cell):
        """-> of which parameter the element in a cell is, or None."""
        element = self.recording["labels"][self.cells[storage][cell][1]][1]
        for index, numel in enumerate(self.recording["params"]):
            if element is not None and element < numel:
                return index
            element = None if element is None else element - numel
        return None

    def rows(self):
        """-> {row: {rank: storages, by part}}, in the order in which they came."""
        rows = {}
        for number, storage in enumerate(self.recording["storages"]):
            rows.setdefault(storage["row"], {}).setdefault(storage["rank"], []).append(number)
        for ranks in rows.values():
            for numbers in ranks.values():
                numbers.sort(key=lambda number: part_key(self.recording["storages"][number]["part"]))
        return rows

    def place(self, rank):
        """-> (function, file, line, text) of the line at which a rank is."""
        function, line = self.recording["stacks"][self.at[rank]][-1]
        name, file, *_ = self.recording["functions"][function]
        title, source = self.recording["files"][file]
        return name, title, line, source.splitlines()[line - 1].strip()


def part_key(part):
    digits = "".join(sign for sign in part if sign.isdecimal())
    return int(digits or 0), part
