"""The PyTorch backend of d2ldev."""

requires = ("torch",)
