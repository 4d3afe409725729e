"""Half of two variants: the inner optimizer steps one bucket after the other, and each is unpacked only meanwhile.

What is kept packed between steps, moments16's moments and remainder16's main parameters, is then unpacked for one
bucket at a time, and not for all of 1/d. For optimizers that count steps for each tensor, as torch's do.
"""

from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class BucketByBucket(OverlapOptimizer):
    def unpack(self, bucket):
        """-> main parameters in fp32, (numel / d,), which a variant may make when they are asked for."""
        return bucket.parameter.main_shard

    def pack(self, bucket):
        bucket.parameter.copy_main_to_model()

    def step_own(self):
        groups = self.optimizer.param_groups
        params = [group["params"] for group in groups]
        for bucket in self.buckets:
            mine = set(bucket.main_params.values())
            for group, its in zip(groups, params):
                group["params"] = [param for param in its if param in mine]
            self.unpack(bucket)
            super().step_own()
            self.pack(bucket)
        for group, its in zip(groups, params):
            group["params"] = its
