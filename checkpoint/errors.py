"""What can go wrong with a checkpoint, a class each: a program asks for the class, and never for words of a line."""


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, or not be loaded here: one line that says why, on every rank."""


class DamagedCheckpoint(CheckpointError):
    """It isn't complete, or not what was written, or the disk can't read it: the one before may be whole."""


class ForeignCheckpoint(CheckpointError):
    """It is whole, and of another model or optimizer, or of another version of this program."""


class FolderInUse(CheckpointError):
    """Another run saves there."""


class UnfitModel(CheckpointError, ValueError):
    """The model or its optimizer is none that a checkpoint could be made of, or loaded into."""
