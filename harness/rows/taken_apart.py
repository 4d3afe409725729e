"""Stage 4 without a part of it: one half of its overlap, or what of it is tuning."""

from unittest import mock

import torch

import stage4_overlap
from harness.rows.training import Training
from harness.rows.ways import STAGE_4, stage_with_prefetch


class LeavesLate(stage4_overlap.DistributedOptimizer):
    """Stage 4 whose buckets leave when the backward pass has ended, and none earlier."""

    pass_has_ended = False

    def send_full_buckets(self):
        if self.pass_has_ended:
            super().send_full_buckets()

    def _finish_round(self):
        self.pass_has_ended = True
        super()._finish_round()
        self.pass_has_ended = False


def leaves_late(prefetch, bucket_cap_mb=None):
    def build(model, adamw):
        optimizer = LeavesLate(model.parameters(), torch.optim.AdamW, bucket_cap_mb=bucket_cap_mb, **adamw)
        if prefetch:
            optimizer.prefetch_params(model)
        return Training(model, model, optimizer)
    return build


def equal_buckets(model, adamw):
    """Stage 4 without the small first and last bucket: each is closed at the cap."""
    def layout(nbytes, dtypes, cap_bytes):
        buckets, filling = [], {}
        for index in reversed(range(len(nbytes))):
            bucket = filling.setdefault(dtypes[index], [])
            bucket.append(index)
            if sum(nbytes[one] for one in bucket) >= cap_bytes:
                buckets.append(filling.pop(dtypes[index]))
        return buckets + list(filling.values())
    with mock.patch.object(stage4_overlap.optimizer, "bucket_layout", layout):
        return stage_with_prefetch(STAGE_4)(model, adamw)


def whole_messages():
    """A context in which stage 4's transport cuts nothing into pieces."""
    return mock.patch.object(stage4_overlap.transport, "PIECE_BYTES", 1 << 40)
