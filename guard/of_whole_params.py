"""For whoever takes stage 1 or 2, where a rank steps whole parameters: all that is around those two cores.

Shown by tests/stages/test_contract.py.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from .amp import Scaled
from .clip import Clipped
from .modes import Modes
from .probe import check_one_by_one
from .refuse import refuse_dtensors, refuse_mixed_dtypes
from .whole import WholeState
from .whole_grads import AnyGrads
from .wrap import Wrapper


class OfWholeParams(AnyGrads, Clipped, Scaled, Modes, WholeState, Wrapper):
    _probe = staticmethod(check_one_by_one)

    def __init__(self, params: ParamsT, optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
                 process_group: dist.ProcessGroup | None = None, average_gradients: bool = True,
                 **optimizer_kwargs: Any) -> None:
        self.average_gradients = average_gradients
        groups = self._prepare(params, optimizer_cls, process_group, optimizer_kwargs,
                               average_gradients=average_gradients)
        super().__init__(groups, optimizer_cls, process_group=process_group, **optimizer_kwargs)

    def _refuse(self, named):
        """One flat tensor holds all gradients. -> `named`"""
        refuse_dtensors(named)
        refuse_mixed_dtypes(named)
        return named
