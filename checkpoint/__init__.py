"""Keeps the state of a sharded optimizer: as one dict, in files, or moved to other ranks.

    full_state_dict(optimizer)   load_full_state_dict(optimizer, state_dict)     one dict, as plain torch has it
    save(path, model, optimizer) load(path, model, optimizer)  latest(folder)    files, for any number of ranks
    reshard(optimizer, process_group)                                            parameters and state move, live

The functions take an optimizer of any stage and, where that makes sense, a plain torch optimizer. No stage imports this
package, and it imports no stage. This is the interface that it uses of a stage's optimizer and guard.chained.Chained:

    optimizer.param_groups       as torch has them: the whole parameters of the model
    optimizer.optimizer          the inner torch optimizer: it updates what this rank owns, in groups like ours
    optimizer.process_group      the ranks that share the work; None: all
    optimizer.pieces()           -> [(param, start, stop, main), …]: this rank updates the flat elements start to stop
                                 of `param` (of its local part, if it is a DTensor). The inner optimizer knows them as
                                 the tensor `main`. Stages 1 and 2 have whole parameters, and main is param; stages 3
                                 and 4 have ranges. Waits for parameters in flight, and takes in what others have
                                 written into the model.
    optimizer.make_optimizer(groups)         a new inner optimizer, to find out what its state consists of
    optimizer.pass_on_hyperparameters()      outer groups -> inner groups
    optimizer.refuse_different_settings()    an error on every rank if the groups of the ranks have different values
    optimizer.move_to(process_group)         stages 3 and 4: exchange the shards for those of the new rank, no state
    optimizer.has_grads                      stages 3 and 4: whether this rank is between backward() and step()
    optimizer.rank                           stages 3 and 4: of this process in process_group; -1: in none
"""

from .errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint, UnfitModel
from .files import latest, load, save
from .full_state import full_state_dict, load_full_state_dict, reshard

__all__ = ["CheckpointError", "DamagedCheckpoint", "ForeignCheckpoint", "UnfitModel", "full_state_dict",
           "latest", "load", "load_full_state_dict", "reshard", "save"]
