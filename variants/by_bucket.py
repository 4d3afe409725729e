"""Updates one bucket after the other, in the order of the forward pass: a base of moments16, remainder16 and muon.

Stage 4 (stage4_overlap/) updates all buckets before it sends the first. A bucket is a list of parameters that are sent
together. The inner optimizer, torch's, updates main parameters: the parts of parameters that this rank owns, or fp32
copies of these parts if the parameters have 16 bits.

Here a bucket is sent while the next bucket is updated, and a variant can unpack the state of one bucket at a time.

Costs: the inner optimizer's `step` is called once for each bucket. So an optimizer that counts its calls is refused.
"""

import functools
import itertools

from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer
from stage4_overlap.optimizer import hyperparameters

PER_PARAMETER = {"params", "param_names"}  # keys of a parameter group whose lists have an item for each parameter


class BucketByBucket(OverlapOptimizer):
    """Stage 4's core, the bare optimizer, which here updates and sends one bucket after the other."""

    def unpack(self, bucket):
        """Return the main parameters of a bucket as one flat tensor. A variant may make them only now."""
        return bucket.parameter.main_shard  # `parameter` is an object: what this rank owns of the bucket

    def pack(self, bucket):
        """Send a bucket's updated parameters. A variant may pack its state before."""
        bucket.start_param_sync()

    def step_own(self):
        """Update and send each bucket. The core's `step` calls this after it has averaged the gradients."""
        self.finish_param_sync()  # parameters of the last step may still be in flight
        for group, own_group in zip(self.param_groups, self.optimizer.param_groups):
            own_group.update(hyperparameters(group))
        for bucket in reversed(self.buckets):  # self.buckets is in the order of the backward pass
            self.unpack(bucket)  # for variants that override it
            # main_params: parameter -> its main parameter on this rank.
            step_only(self.optimizer, bucket.main_params.values())
            bucket.gradient.is_empty = True  # the next gradients replace these gradients
            self.pack(bucket)

    def sync_params(self):
        """Wait for the parameters, which `pack` has sent, unless `step` may return before they arrive."""
        if not self.prefetching:  # the core's prefetch_params() sets it
            self.finish_param_sync()


def step_only(optimizer, chosen, step=None):
    """Let `optimizer` step only the parameters in `chosen`.

    The other parameters are taken out of its groups, and their gradients are hidden, until the step has ended.

    step: the method to call in place of `optimizer.step`.
    """
    step = step or optimizer.step
    whole_groups = [dict(group) for group in optimizer.param_groups]  # copies, to restore the groups from
    chosen_ids = set(map(id, chosen))  # ids, because a tensor's own hash is slow
    hidden = []  # (parameter, its gradient)
    try:
        for group, whole_group in zip(optimizer.param_groups, whole_groups):
            are_chosen = [id(param) in chosen_ids for param in group["params"]]
            for param, is_chosen in zip(group["params"], are_chosen):
                if not is_chosen:
                    hidden.append((param, param.grad))
                    param.grad = None  # because a class may keep its own list of parameters, and step that
            for key in PER_PARAMETER & group.keys():
                group[key] = list(itertools.compress(whole_group[key], are_chosen))  # items of chosen parameters
        step()
    finally:
        for group, whole_group in zip(optimizer.param_groups, whole_groups):
            for key in PER_PARAMETER & group.keys():
                group[key] = whole_group[key]
        for param, grad in hidden:
            param.grad = grad


def probe_of_single_steps(check, **arguments):
    """Return a `_probe`, which the guard (guard/) calls in its constructor to refuse an optimizer class.

    The probe trains a few tensors twice: by one call of `step`, and by a call for each tensor. It raises an error if
    the results differ, because then the class counts its calls.

    check: a function of guard/probe.py, which compares two trainings. It may refuse more.
    arguments: more arguments for `check`.
    """
    def probe(make_optimizer, groups):  # make_optimizer: a functools.partial
        # make_optimizer.func is the optimizer class, .keywords are its arguments: lr and so on.
        make_single_stepper = functools.partial(class_of_single_steps(make_optimizer.func), **make_optimizer.keywords)
        return check(make_single_stepper, groups, make_plain=make_optimizer, **arguments)
    return staticmethod(probe)


@functools.cache
def class_of_single_steps(optimizer_cls):
    """Return a subclass of `optimizer_cls` whose `step` calls the `step` of `optimizer_cls` for each parameter."""
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:  # step_only puts another list into the group, and leaves this list as it is
                step_only(self, {param}, super(subclass, self).step)
    subclass = type(optimizer_cls.__name__, (optimizer_cls,), {"step": step})
    return subclass
