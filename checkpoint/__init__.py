"""Keeps the state of a sharded optimizer: in files, as one dict, or moved to other ranks.

    save(path, model, optimizer) load(path, model, optimizer)  latest(folder)    files, for any number of ranks
    full_state_dict(optimizer)   load_full_state_dict(optimizer, state_dict)     one dict, as plain torch has it
    reshard(optimizer, process_group)                                            parameters and state move, live

The functions take an optimizer of any stage or variant, and guard.chained.Chained. `save` and `load` take a plain torch
optimizer, too. All functions call `state_dict()` and `load_state_dict()`, as torch's own tools do. No stage imports
this package, and it imports no stage. Beside these two methods it needs these of a stage's optimizer:

    optimizer.pieces()           -> [(param, start, stop, main), …]: this rank updates the flat elements start to stop
                                 of `param` (of its local part, if it is a DTensor). The inner optimizer knows them as
                                 the tensor `main`. Waits for parameters in flight, and updates `main` where
                                 other code has written into the model.
    optimizer.make_optimizer(groups)         a new inner optimizer, to find out which entries its state has
    optimizer.refuse_different_settings()    an error on every rank if the groups of the ranks have different values
    optimizer.move_to(process_group)         stages 3 and 4: take the shards of the new rank, without state
    optimizer.has_grads                      stages 3 and 4: whether this rank is between backward() and step()
"""

from .files import latest, load, save
from .full_state import full_state_dict, load_full_state_dict, reshard
from .ranks import CheckpointError, DamagedCheckpoint, ForeignCheckpoint, UnfitModel

__all__ = ["CheckpointError", "DamagedCheckpoint", "ForeignCheckpoint", "UnfitModel", "full_state_dict",
           "latest", "load", "load_full_state_dict", "reshard", "save"]
