"""torchvision on a CPU build of PyTorch: PyPI has wheels for CUDA builds alone.

Without its compiled operators torchvision 0.28 cannot be imported, because it describes ``nms``.
Here ``nms`` is Python. What else of torchvision has an own kernel has one in Python there.
"""

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _suppress(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    from torchvision.ops import box_iou

    kept: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        if not kept or float(box_iou(boxes[i : i + 1], boxes[kept]).max()) <= iou_threshold:
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device)


def define_operators() -> None:
    """Define the operators that torchvision lacks; with a build that has them, do nothing."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", _SCHEMA)
        torch.library.impl("torchvision::nms", "default", _suppress)
    from torchvision import extension
    from torchvision.ops import boxes

    if not extension._has_ops():
        boxes._assert_has_ops = lambda: None


define_operators()
