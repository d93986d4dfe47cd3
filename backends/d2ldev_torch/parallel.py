"""Several devices: copies of modules."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from d2ldev.framework import Parallel
from d2ldev.framework.parallel import no_twin


class TorchParallel(Parallel):
    """Copies of modules."""

    def twin(self, model: Any) -> Any:
        if not isinstance(model, torch.nn.Module):
            raise no_twin(model)
        return deepcopy(model)
