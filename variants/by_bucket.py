"""Updates one bucket after the other, in the order of the forward pass: a base of three variants.

moments16 and remainder16 keep moments and main parameters packed between steps. They unpack one bucket at a time, and
never the whole 1/d at once. A bucket is sent while the next bucket is updated. The optimizer must count steps per
tensor, as torch's optimizers do. An optimizer that counts its calls is refused.
"""

import functools

from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer
from stage4_overlap.optimizer import hyperparameters


class BucketByBucket(OverlapOptimizer):
    def unpack(self, bucket):
        """Return the bucket's main parameters in fp32, (numel / d,). A variant may make them only now."""
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
        """Wait for the parameters, which `pack` has sent, unless they are prefetched."""
        if not self.prefetching:
            self.finish_param_sync()


def step_only(optimizer, chosen, step=None):
    """Let `optimizer` step only the parameters in `chosen`: hide its other parameters and their gradients meanwhile.

    step: the method to call, if it isn't `optimizer.step`.
    """
    groups = [dict(group) for group in optimizer.param_groups]
    chosen = set(map(id, chosen))  # because a tensor's own hash is slow
    hidden = [(param, param.grad) for group in groups for param in group["params"] if id(param) not in chosen]
    try:
        for param, _ in hidden:
            param.grad = None  # because a class may have listed its parameters in its constructor
        for group, whole in zip(optimizer.param_groups, groups):
            for key in {"params", "param_names"} & group.keys():  # names are in the order of the parameters
                group[key] = [item for item, param in zip(whole[key], whole["params"]) if id(param) in chosen]
        (step or optimizer.step)()
    finally:
        for group, whole in zip(optimizer.param_groups, groups):
            group.update({key: whole[key] for key in {"params", "param_names"} & group.keys()})
        for param, grad in hidden:
            param.grad = grad


def tried_tensor_by_tensor(check, **arguments):
    """Return a `_probe` that runs `check` with a call of `step` per tensor: an optimizer that counts calls fails it."""
    def probe(make_optimizer, groups):
        one_by_one = functools.partial(stepped_one_by_one(make_optimizer.func), **make_optimizer.keywords)
        return check(one_by_one, groups, make_plain=make_optimizer, **arguments)
    return staticmethod(probe)


@functools.cache
def stepped_one_by_one(optimizer_cls):
    """Return a subclass of `optimizer_cls` whose `step` steps each parameter in a call of its own."""
    def step(self, closure=None):
        for param in [param for group in self.param_groups for param in group["params"]]:
            step_only(self, {param}, super(cls, self).step)
    cls = type(optimizer_cls.__name__, (optimizer_cls,), {"step": step})
    return cls
