"""What memory is: the kinds that a rank's bytes are told apart in."""

REST = "buffers"  # what nobody has marked: after a step that is what neither the model nor an optimizer calls its own
KINDS = "parameters", "gradients", "state", REST
