"""Half of three variants: the inner optimizer updates one bucket after the other, in the order of the forward pass.

moments16 and remainder16 keep moments and main parameters packed between steps. This module unpacks them one bucket at
a time, and never the whole 1/d at once. A bucket is sent while the next one is updated. The optimizer must count steps
per tensor, as torch's optimizers do; one that counts its calls is refused.
"""

import functools

from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer
from stage4_overlap.optimizer import hyperparameters


class BucketByBucket(OverlapOptimizer):
    def unpack(self, bucket):
        """Return main parameters in fp32, (numel / d,), which a variant may make only now."""
        return bucket.parameter.main_shard

    def pack(self, bucket):
        """Send a bucket's parameters as soon as they are updated."""
        bucket.start_param_sync()

    def step_own(self):
        self.finish_param_sync()
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            own.update(hyperparameters(group))
        for bucket in reversed(self.buckets):
            self.unpack(bucket)
            step_only(self.optimizer, bucket.main_params.values())
            bucket.gradient.is_empty = True
            self.pack(bucket)

    def sync_params(self):
        """Wait for the parameters unless they are prefetched: `pack` has sent them."""
        if not self.prefetching:
            self.finish_param_sync()


def step_only(optimizer, chosen, step=None):
    """Let `optimizer` step those of its parameters that are among `chosen`. Hide the others, and their gradients."""
    groups = [dict(group) for group in optimizer.param_groups]
    chosen = set(map(id, chosen))  # because a tensor's own hash is slow
    hidden = [(param, param.grad) for group in groups for param in group["params"] if id(param) not in chosen]
    try:
        for param, _ in hidden:
            param.grad = None  # because a class may have listed its parameters in its constructor
        for group, whole in zip(optimizer.param_groups, groups):
            for key in {"params", "param_names"} & group.keys():  # names say which parameter they are of
                group[key] = [item for item, param in zip(whole[key], whole["params"]) if id(param) in chosen]
        (step or optimizer.step)()
    finally:
        for group, whole in zip(optimizer.param_groups, groups):
            group.update({key: whole[key] for key in {"params", "param_names"} & group.keys()})
        for param, grad in hidden:
            param.grad = grad


def tried_tensor_by_tensor(check, **arguments):
    """Return the guard's trial `check`, with a call for each tensor, so that an optimizer that counts calls fails."""
    def probe(make_optimizer, groups):
        one_by_one = functools.partial(stepped_one_by_one(make_optimizer.func), **make_optimizer.keywords)
        return check(one_by_one, groups, make_plain=make_optimizer, **arguments)
    return staticmethod(probe)


@functools.cache
def stepped_one_by_one(optimizer_cls):
    def step(self, closure=None):
        for param in [param for group in self.param_groups for param in group["params"]]:
            step_only(self, {param}, super(cls, self).step)
    cls = type(optimizer_cls.__name__, (optimizer_cls,), {"step": step})
    return cls
