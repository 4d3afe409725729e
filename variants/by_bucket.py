"""Updates one bucket after the other, in the order of the forward pass: a base of three variants.

moments16 and remainder16 keep moments and main parameters packed between steps: in 16 bits. They unpack one bucket at a
time, and never all that a rank owns at once. A bucket is sent while the next bucket is updated. The optimizer's `step`
is called once for each bucket, so the optimizer must count steps per tensor, as torch's optimizers do. An optimizer
that counts its calls is refused.
"""

import functools
import itertools

from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer
from stage4_overlap.optimizer import hyperparameters

PER_PARAMETER = {"params", "param_names"}  # entries of a group that have an item for each parameter


class BucketByBucket(OverlapOptimizer):
    def unpack(self, bucket):
        """Return what this rank updates of a bucket, in fp32, (numel / d,). A variant may make it only now."""
        return bucket.parameter.main_shard

    def pack(self, bucket):
        """Send a bucket's parameters as soon as they are updated."""
        bucket.start_param_sync()

    def step_own(self):
        self.finish_param_sync()
        for group, own_group in zip(self.param_groups, self.optimizer.param_groups):
            own_group.update(hyperparameters(group))
        for bucket in reversed(self.buckets):  # buckets are in the order of the backward pass
            self.unpack(bucket)
            step_only(self.optimizer, bucket.main_params.values())
            bucket.gradient.is_empty = True  # the next gradients replace these
            self.pack(bucket)

    def sync_params(self):
        """Wait for the parameters, which `pack` has sent, unless they are prefetched."""
        if not self.prefetching:
            self.finish_param_sync()


def step_only(optimizer, chosen, step=None):
    """Let `optimizer` step only the parameters in `chosen`: hide its other parameters and their gradients meanwhile.

    step: the method to call, if it isn't `optimizer.step`.
    """
    step = step or optimizer.step
    whole_groups = [dict(group) for group in optimizer.param_groups]  # copies
    chosen_ids = set(map(id, chosen))  # because a tensor's own hash is slow
    hidden = []  # (parameter, its gradient)
    try:
        for group, whole_group in zip(optimizer.param_groups, whole_groups):
            are_chosen = [id(param) in chosen_ids for param in group["params"]]
            for param, is_chosen in zip(group["params"], are_chosen):
                if not is_chosen:
                    hidden.append((param, param.grad))
                    param.grad = None  # because a class may have listed its parameters in its constructor
            for key in PER_PARAMETER & group.keys():
                group[key] = list(itertools.compress(whole_group[key], are_chosen))
        step()
    finally:
        for group, whole_group in zip(optimizer.param_groups, whole_groups):
            for key in PER_PARAMETER & group.keys():
                group[key] = whole_group[key]
        for param, grad in hidden:
            param.grad = grad


def tried_tensor_by_tensor(check, **arguments):
    """Return a `_probe` for a DistributedOptimizer: it refuses an optimizer class that counts its calls.

    `check`, a function of guard/probe.py, compares two trainings. One of them has a call of `step` per tensor.
    """
    def probe(make_optimizer, groups):
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
