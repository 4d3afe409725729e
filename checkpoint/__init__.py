"""Nothing is lost: the state of a sharded optimizer as one dict, as files, and on the move to other ranks.

    full_state_dict(optimizer)   load_full_state_dict(optimizer, state_dict)     one dict, as plain torch has it
    save(path, model, optimizer) load(path, model, optimizer)  latest(folder)    files, for any number of ranks
    reshard(optimizer, process_group)                                            parameters and state move, live

What goes wrong with files is a class of errors.py, each a CheckpointError, on every rank.

It takes an optimizer of any stage, and where that makes sense a plain torch optimizer. No stage imports this package,
and it imports no stage. What it asks of a stage's optimizer, and of several in guard.chained.Chained, is this face:

    optimizer.param_groups       as torch has them: the whole parameters of the model
    optimizer.optimizer          the inner torch optimizer: it steps what this rank owns, in groups like ours
    optimizer.process_group      the ranks that share the work; None: all
    optimizer.rank               of this process in process_group; -1: in none since reshard()
    optimizer.pieces()           -> [(param, start, stop, main), …]: this rank steps the flat elements start to stop of
                                 `param`, of a DTensor those of what this rank has, and the inner optimizer knows them
                                 as the tensor `main`. Whole parameters in stages 1 and 2, where main is param; ranges
                                 in stages 3 and 4. It waits for parameters that are under way, and takes in what others
                                 have written into the model.
    optimizer.make_optimizer(groups)         another inner optimizer, to see what its state consists of
    optimizer.pass_on_hyperparameters()      outer groups -> inner groups
    optimizer.refuse_different_settings()    an error on every rank where groups of the ranks have other values
    optimizer.move_to(process_group)         stages 3 and 4: give up the shards, take those of the new place, no state
    optimizer.has_grads                      stages 3 and 4: whether this rank is between backward() and step()
"""

from .errors import CheckpointError, DamagedCheckpoint, FolderInUse, ForeignCheckpoint, UnfitModel
from .full_state import full_state_dict, load_full_state_dict
from .reading import latest, load
from .reshard import reshard
from .writing import save

__all__ = ["CheckpointError", "DamagedCheckpoint", "FolderInUse", "ForeignCheckpoint", "UnfitModel", "full_state_dict",
           "latest", "load", "load_full_state_dict", "reshard", "save"]
