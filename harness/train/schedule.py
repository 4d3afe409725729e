"""The learning rate over the steps."""

import math


def warmup_then_cosine(steps):
    """For LambdaLR: the learning rate's factor, up to 1 in the first fifth (at most 100 steps), then down to 0.1."""
    warmup = max(1, min(steps // 5, 100))

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)  # 0 to 1
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
    return factor
