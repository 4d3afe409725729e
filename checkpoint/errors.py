"""What can go wrong with a checkpoint: one class per case, so that programs needn't parse messages."""


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or loaded here. The message says why, in one line, the same kind on every rank."""


class DamagedCheckpoint(CheckpointError):
    """It is incomplete, changed since it was written, or unreadable. An earlier checkpoint may be intact."""


class ForeignCheckpoint(CheckpointError):
    """It is intact, but from another model or optimizer, or another version of this program."""


class UnfitModel(CheckpointError, ValueError):
    """The model or its optimizer can't be saved in a checkpoint, or loaded from one."""
