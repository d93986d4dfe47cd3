"""The TensorFlow backend of d2ldev."""

requires = ("tensorflow",)
