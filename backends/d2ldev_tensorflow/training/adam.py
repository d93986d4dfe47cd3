"""Adam as it was published: Keras adds epsilon before it corrects the root of the squares."""

from __future__ import annotations

from typing import Any

import keras


class Adam(keras.optimizers.Adam):
    """Adam that adds epsilon to the corrected root, as Kingma and Ba (2015) do.

    In Keras's own first step epsilon weighs thirty times as much. After thousands of steps both
    agree.
    """

    epsilon: Any

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Take a step of one variable, with the epsilon that Keras has to be given for it."""
        epsilon = self.epsilon
        steps = keras.ops.cast(self.iterations + 1, variable.dtype)
        self.epsilon = epsilon * keras.ops.sqrt(1 - keras.ops.power(self.beta_2, steps))
        try:
            super().update_step(gradient, variable, learning_rate)
        finally:
            self.epsilon = epsilon
