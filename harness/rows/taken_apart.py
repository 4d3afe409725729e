"""Stage 4 without a part of it: one half of its overlap, or what of it is tuning."""

from unittest import mock

import torch

import stage4_overlap
from harness.rows.training import Training


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


def whole_messages():
    """A context in which stage 4's transport cuts nothing into pieces."""
    return mock.patch.object(stage4_overlap.transport, "PIECE_BYTES", 1 << 40)
