"""Saves and loads the state of a distributed optimizer: in files, as one dict, or by moving it to other ranks.

In a distributed optimizer each rank updates a part of the parameters by an *inner optimizer*, such as torch's AdamW,
and has the state (momenta, for example) of this part only. The project has four versions of it, the *stages*, in the
folders stage*/, and *variants* of these in variants/.

    save(path, model, optimizer) load(path, model, optimizer)  latest(folder)    files, for any number of ranks
    full_state_dict(optimizer)   load_full_state_dict(optimizer, state_dict)     one dict, as plain torch has it
    reshard(optimizer, process_group)                                            moves parameters and state to ranks

The functions take an optimizer of any stage or variant, and guard.chained.Chained, which joins several optimizers of
one model. `save` and `load` take a plain torch optimizer, too. All functions call `state_dict()` and
`load_state_dict()`, as torch's own tools do. No stage imports this package, and it imports no stage. Of a stage's
optimizer the package also needs these methods and this attribute:

    optimizer.pieces()           -> [(param, start, stop, main), …]: this rank updates the flat elements start to stop
                                 of `param` (of its local part, if it is a DTensor). The inner optimizer has them as
                                 the tensor `main`, with what other code has written into the model. The method waits
                                 for parameters in flight.
    optimizer.make_optimizer(groups)         returns a new inner optimizer, which shows which entries a state has
    optimizer.refuse_different_settings()    raises on every rank if the groups of the ranks have different values
    optimizer.move_to(process_group)         stages 3 and 4: takes the shards of the new rank, without their state
    optimizer.has_grads                      stages 3 and 4: whether this rank is between backward() and step()
"""

from .files import latest, load, save
from .full_state import full_state_dict, load_full_state_dict, reshard
from .ranks import CheckpointError, DamagedCheckpoint, ForeignCheckpoint, UnfitModel

__all__ = ["CheckpointError", "DamagedCheckpoint", "ForeignCheckpoint", "UnfitModel", "full_state_dict",
           "latest", "load", "load_full_state_dict", "reshard", "save"]
