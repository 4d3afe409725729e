"""For whoever has ranks with other settings, as settings.py says. Here no message of a step has room for them.

So a few elements more lie in the buffer, behind the last parameter. Flags of a rank's settings are added up there with
the gradients, and gathered with the parameters: no collective more, and nothing to wait for. Shown by
tests/stages/test_users.py,
`test_settings_that_differ_between_ranks_are_an_error_on_every_rank`.
"""

import torch

from ..buffer import GradBuffer, cut_ranges
from .settings import N_FLAGS, checksum_of, difference_between_ranks, flags_of, settings_of, sums_differ


class ComparesSettings:
    checksum = None  # of the settings of this rank, as the buffers have it
    flags_event = None  # of the GPU, when the flags of the last step will have arrived

    def shard(self, groups):
        super().shard(groups)
        self.checksum = None  # the buffers may be new ones

    def finish_grad_sync(self):
        if self.flags_event is not None and self.buffers:
            self.flags_event.synchronize()
            self.refuse_different_settings()
        checksum = checksum_of(settings_of(self))
        if checksum != self.checksum:
            self.checksum = checksum
            for buffer in self.buffers[:1]:
                buffer.flags = buffer.flat.new_tensor(flags_of(checksum))
        super().finish_grad_sync()

    def sync_params(self):
        """A CPU compares at once, in the step itself; a GPU as the next one begins, or this one would wait for it."""
        super().sync_params()
        buffer = self.buffers[0]
        buffer.seen_flags.copy_(buffer.gathered_flags, non_blocking=True)
        if buffer.flat.is_cuda:
            self.flags_event = torch.cuda.Event()
            self.flags_event.record()
        else:
            self.refuse_different_settings()

    def refuse_different_settings(self):
        self.flags_event = None
        if sums_differ(self.buffers[0].seen_flags.tolist()):
            difference = difference_between_ranks(settings_of(self), self.process_group)
            if difference:
                self.zero_grad()
                raise RuntimeError(difference)


class CarriesFlags(GradBuffer):
    """Attributes:
        flags: what this rank has to say, (N_FLAGS,).
        summed_flags, gathered_flags, seen_flags: the same: in `flat`; of all ranks, in `flat_params`; and on the CPU.
        own_flags: the range of them that lies in this rank's shard, a view of its sums, and memory to keep them in.
    """

    def __init__(self, params, grad_dtype, process_group):
        super().__init__([*params, params[0].new_zeros(N_FLAGS)], grad_dtype, process_group)
        self.params, self.own_flags = params, None
        self.summed_flags = self.grads.pop()
        self.gathered_flags = self.new_params.pop()
        self.flags = torch.zeros_like(self.summed_flags)
        self.seen_flags = torch.empty(N_FLAGS, dtype=self.flat_params.dtype, pin_memory=self.flat.is_cuda)
        if self.ranges and self.ranges[-1].index == len(params):
            self.main_params.pop()
            sums = self.main_grads.pop()
            self.own_flags = self.ranges.pop(), sums, torch.empty_like(sums)

    def reduce_scatter_grads(self):
        self.summed_flags.copy_(self.flags)
        super().reduce_scatter_grads()

    def take_main_params(self):
        if self.own_flags is None:
            return super().take_main_params()
        where, sums, kept = self.own_flags
        kept.copy_(sums)  # parameters may overwrite them
        super().take_main_params()
        (place,) = cut_ranges(self.param_shard, [where])
        place.copy_(kept)
