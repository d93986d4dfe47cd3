"""The JAX backend of d2ldev."""

requires = ("jax",)
