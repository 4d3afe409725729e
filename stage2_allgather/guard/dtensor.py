"""For whoever brings a tensor-parallel model: its parameters are DTensors, which stage 4 shards, and this stage can't.

Shown by tests/stages/test_dtensor.py.
"""


def refuse_dtensors(named):
    for name, param in named:
        if hasattr(param, "device_mesh"):
            raise ValueError(f"parameter {name} is a DTensor: use stage 4, which shards what each rank has of it")
