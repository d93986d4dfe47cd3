"""The MXNet backend of d2ldev."""

requires = ("mxnet",)
