"""Three closed issues of kornia, in the releases before they were mended.

- https://github.com/kornia/kornia/issues/2926: kornia 0.7.2
- https://github.com/kornia/kornia/issues/3028: kornia 0.7.3
- https://github.com/kornia/kornia/issues/3066: kornia 0.7.4
"""

import kornia
import torch


def test_no_keypoints():
    """Issue 2926: descriptors of no keypoints come back on the CPU."""
    image, lafs = torch.rand(1, 1, 32, 32), torch.empty(1, 0, 2, 3)
    descriptors = kornia.feature.get_laf_descriptors(image, lafs, kornia.feature.HardNet(False))
    assert descriptors.shape[1] == 0


def test_gaussian_illumination():
    """Issue 3028: a parameter is created on the CPU."""
    augment = kornia.augmentation.RandomGaussianIllumination(p=1.0)
    assert augment(torch.rand(2, 3, 16, 16)).shape == (2, 3, 16, 16)


def test_image_and_boxes():
    """Issue 3066: with boxes, the results are moved to the CPU."""
    augment = kornia.augmentation.AugmentationSequential(
        kornia.augmentation.RandomHorizontalFlip(p=1.0), data_keys=["image", "bbox_xyxy"]
    )
    image, boxes = augment(torch.rand(1, 3, 16, 16), torch.tensor([[[1.0, 1.0, 8.0, 8.0]]]))
    assert image.shape == (1, 3, 16, 16)
    assert boxes.shape == (1, 1, 4)
