"""Updates one bucket after the other, in the order of the forward pass: a base of moments16, remainder16 and muon.

Stage 4 (stage4_overlap/) updates all buckets before it sends the first. A bucket is a list of parameters that are sent
together. The inner optimizer, torch's, updates main parameters: the parts of parameters that this rank owns, or fp32
copies of them if they have 16 bits.
Here a bucket is sent while the next bucket is updated. moments16 keeps moments in 16 bits between steps, remainder16
does so with a half of each main parameter. They unpack one bucket at a time, and never all that a rank owns at once.
The inner optimizer's `step` is called once for each bucket, so the optimizer must count steps per tensor, as torch's
optimizers do. An optimizer that counts its calls is refused.
"""

import functools
import itertools

from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer
from stage4_overlap.optimizer import hyperparameters

PER_PARAMETER = {"params", "param_names"}  # entries of a group that have an item for each parameter


class BucketByBucket(OverlapOptimizer):
    """Stage 4's core, which updates and sends one bucket after the other."""

    def unpack(self, bucket):
        """Return the main parameters of a bucket as one tensor, (numel / d,). A variant may make them only now."""
        return bucket.parameter.main_shard

    def pack(self, bucket):
        """Send a bucket's parameters, which were just updated. A variant may pack its state before."""
        bucket.start_param_sync()

    def step_own(self):
        """Update and send each bucket. The core's `step` calls this after it has averaged the gradients."""
        self.finish_param_sync()  # no forward pass may have waited for some parameters of the last step
        for group, own_group in zip(self.param_groups, self.optimizer.param_groups):
            own_group.update(hyperparameters(group))
        for bucket in reversed(self.buckets):  # self.buckets is in the order of the backward pass
            self.unpack(bucket)
            step_only(self.optimizer, bucket.main_params.values())
            bucket.gradient.is_empty = True  # the next gradients replace these
            self.pack(bucket)

    def sync_params(self):
        """Wait for the parameters, which `pack` has sent, unless they are prefetched."""
        if not self.prefetching:
            self.finish_param_sync()


def step_only(optimizer, chosen, step=None):
    """Let `optimizer` step only the parameters in `chosen`.

    During the step its groups lack the other parameters, and these have no gradients.

    step: the method to call in place of `optimizer.step`.
    """
    step = step or optimizer.step
    whole_groups = [dict(group) for group in optimizer.param_groups]  # copies, to restore the groups from
    chosen_ids = set(map(id, chosen))  # because a tensor's own hash is slow
    hidden = []  # (parameter, its gradient)
    try:
        for group, whole_group in zip(optimizer.param_groups, whole_groups):
            are_chosen = [id(param) in chosen_ids for param in group["params"]]
            for param, is_chosen in zip(group["params"], are_chosen):
                if not is_chosen:
                    hidden.append((param, param.grad))
                    param.grad = None  # a class may step a list of parameters that it has made in its constructor
            for key in PER_PARAMETER & group.keys():
                group[key] = list(itertools.compress(whole_group[key], are_chosen))  # the items that are chosen
        step()
    finally:
        for group, whole_group in zip(optimizer.param_groups, whole_groups):
            for key in PER_PARAMETER & group.keys():
                group[key] = whole_group[key]
        for param, grad in hidden:
            param.grad = grad


def tried_tensor_by_tensor(check, **arguments):
    """Return a `_probe` for a DistributedOptimizer: it refuses an optimizer class that counts its calls.

    The guard calls `_probe` in the constructor. `check`, a function of guard/probe.py, compares two trainings. One of
    them calls `step` once per tensor.

    arguments: more arguments for `check`.
    """
    def probe(make_optimizer, groups):  # make_optimizer: a functools.partial of the optimizer class
        make_stepped_one_by_one = functools.partial(stepped_one_by_one(make_optimizer.func), **make_optimizer.keywords)
        return check(make_stepped_one_by_one, groups, make_plain=make_optimizer, **arguments)
    return staticmethod(probe)


@functools.cache
def stepped_one_by_one(optimizer_cls):
    """Return a subclass of `optimizer_cls` whose `step` steps each parameter in a call of its own."""
    def step(self, closure=None):
        for param in [param for group in self.param_groups for param in group["params"]]:
            step_only(self, {param}, super(subclass, self).step)
    subclass = type(optimizer_cls.__name__, (optimizer_cls,), {"step": step})
    return subclass
