"""The rate at which the model takes as long as a run did."""

import math


def calibrated(rate, modelled, hardware, measured):
    """`hardware` with that `rate` ("flops", "between") at which modelled(hardware) takes `measured` seconds."""
    low, high = 1e6, 1e16
    for _ in range(50):
        middle = math.sqrt(low * high)
        found = hardware._replace(**{rate: middle})
        low, high = (middle, high) if modelled(found) > measured else (low, middle)
    if abs(modelled(found) / measured - 1) > 1e-3:
        raise ValueError(f"no {rate} gives {measured:.3g} s: the model takes {modelled(found):.3g} s")
    return found
