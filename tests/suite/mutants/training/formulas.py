"""Mutants whose named losses, clipping and optimizers have other numbers than they should."""

from __future__ import annotations

from typing import ClassVar

import array_api_strict as xp

from mutants import Mutant
from mutants.provision import NetworkLearner

OPTIMIZERS = "train.named-optimizers"
CLIPS = "train.clips-as-torch-does"
LOSSES = "train.named-losses"


class OtherAdam(NetworkLearner):
    """Adam with numbers that can be set."""

    betas: ClassVar = (0.9, 0.999)
    epsilon: ClassVar = 1e-8
    is_corrected: ClassVar = (True, True)
    is_epsilon_corrected: ClassVar = True

    def _update_parameter(self, steps, x, gradient, first, second):
        if self.settings.optimizer not in ("adam", "adamw"):
            return super()._update_parameter(steps, x, gradient, first, second)
        lr = self.settings.lr
        if self.settings.optimizer == "adamw":
            x = self.decay(x, lr)
        first = self.betas[0] * first + (1 - self.betas[0]) * gradient
        second = self.betas[1] * second + (1 - self.betas[1]) * gradient * gradient
        one, two = (
            1 - beta**steps if is_corrected else 1.0
            for beta, is_corrected in zip(self.betas, self.is_corrected, strict=True)
        )
        epsilon = self.epsilon if self.is_epsilon_corrected else self.epsilon / two**0.5
        return x - lr * (first / one) / (xp.sqrt(second / two) + epsilon), first, second

    def decay(self, x, lr):
        return x * (1 - 0.01 * lr)


class AdamForgetsFaster(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        betas = (0.9, 0.99)


class AdamMeansHalves(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        betas = (0.5, 0.5)


class AdamHasTheEpsilonOfKeras(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        epsilon = 1e-7


class AdamHasNoEpsilon(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        epsilon = 1e-30


class AdamAddsEpsilonBeforeItCorrects(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        is_epsilon_corrected = False


class AdamCorrectsNothing(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        is_corrected = (False, False)


class AdamCorrectsTheMeansAlone(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        is_corrected = (True, False)


class AdamCountsBatches(Mutant, caught_by=OPTIMIZERS):
    class Learner(NetworkLearner):
        def _update_parameter(self, steps, *others):
            count = self.settings.accumulate_grad_batches
            return super()._update_parameter(steps * count, *others)


class MomentumDecaysWithEachBatch(Mutant, caught_by=OPTIMIZERS):
    class Learner(NetworkLearner):
        def _update_parameter(self, steps, x, gradient, first, second):
            if self.settings.optimizer == "momentum":
                first = first * 0.9 ** (self.settings.accumulate_grad_batches - 1)
            return super()._update_parameter(steps, x, gradient, first, second)


class AdamWDecaysInTheGradient(Mutant, caught_by=OPTIMIZERS):
    class Learner(NetworkLearner):
        def _update_parameter(self, steps, x, gradient, *moments):
            if self.settings.optimizer == "adamw":
                x, gradient = x / (1 - 0.01 * self.settings.lr), gradient + 0.01 * x
            return super()._update_parameter(steps, x, gradient, *moments)


class AdamWDecaysWithoutTheRate(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        def decay(self, x, lr):
            return x * (1 - 0.01)


class AdamWDecaysAsKerasDoes(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        def decay(self, x, lr):
            return x * (1 - 0.004 * lr)


class AdamWDecaysWeightsAlone(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdam):
        def decay(self, x, lr):
            return x * (1 - 0.01 * lr) if x.ndim > 1 else x


class AdamDecaysToo(Mutant, caught_by=OPTIMIZERS):
    class Learner(NetworkLearner):
        def _update_parameter(self, steps, x, *others):
            if self.settings.optimizer == "adam":
                x = x * (1 - 0.01 * self.settings.lr)
            return super()._update_parameter(steps, x, *others)


class OtherAdagrad(NetworkLearner):
    """AdaGrad with numbers that can be set."""

    epsilon: ClassVar = 1e-10
    begins_at: ClassVar = 0.0

    def _update_parameter(self, steps, x, gradient, first, second):
        if self.settings.optimizer != "adagrad":
            return super()._update_parameter(steps, x, gradient, first, second)
        second = second + gradient * gradient
        root = xp.sqrt(second + self.begins_at) + self.epsilon
        return x - self.settings.lr * gradient / root, first, second


class AdagradHasTheEpsilonOfKeras(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdagrad):
        epsilon = 1e-7


class AdagradHasAThousandthForEpsilon(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdagrad):
        epsilon = 1e-3


class AdagradBeginsAtATenth(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherAdagrad):
        begins_at = 0.1


class OtherMomentum(NetworkLearner):
    """Momentum with numbers that can be set."""

    momentum: ClassVar = 0.9
    damps: ClassVar = False
    is_of_nesterov: ClassVar = False

    def _update_parameter(self, steps, x, gradient, first, second):
        if self.settings.optimizer != "momentum":
            return super()._update_parameter(steps, x, gradient, first, second)
        share = 1 - self.momentum if self.damps and steps > 1 else 1.0
        first = self.momentum * first + share * gradient
        change = gradient + self.momentum * first if self.is_of_nesterov else first
        return x - self.settings.lr * change, first, second


class MomentumIsDamped(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherMomentum):
        damps = True


class MomentumIsOfNesterov(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherMomentum):
        is_of_nesterov = True


class MomentumIsGreater(Mutant, caught_by=OPTIMIZERS):
    class Learner(OtherMomentum):
        momentum = 0.99


class GradientDescentHasMomentum(Mutant, caught_by=OPTIMIZERS):
    class Training(Mutant.Training):
        def learner(self, model, settings):
            name = "momentum" if settings.optimizer == "sgd" else settings.optimizer
            return super().learner(model, settings._replace(optimizer=name))


# -- clipping -------------------------------------------------------------------------------------


class ClipsEachParameter(Mutant, caught_by=CLIPS):
    class Learner(NetworkLearner):
        def _clip(self, gradients):
            clip = super()._clip
            return [
                {name: clip([{name: g}])[0][name] for name, g in layer.items()}
                for layer in gradients
            ]


class ClipsEachNumber(Mutant, caught_by=CLIPS):
    class Learner(NetworkLearner):
        def _clip(self, gradients):
            largest = self.settings.gradient_clip_val or float("inf")
            return [
                {name: xp.clip(g, -largest, largest) for name, g in layer.items()}
                for layer in gradients
            ]


class ClipsScaledGradients(Mutant, caught_by="train.clips-in-fewer-bits"):
    class Learner(NetworkLearner):
        def _clip(self, gradients):
            scale = self._optimizer.get("scale", 1.0)
            scaled = [{name: g * scale for name, g in layer.items()} for layer in gradients]
            clipped = super()._clip(scaled)
            return [{name: g / scale for name, g in layer.items()} for layer in clipped]


# -- losses ---------------------------------------------------------------------------------------


class ScaledLosses(NetworkLearner):
    """Losses times a factor."""

    def _losses(self, prediction, y):
        losses, errors, counts = super()._losses(prediction, y)
        factor = self.factor(prediction)
        return losses * factor, errors * factor, counts

    def factor(self, prediction):
        raise NotImplementedError


class SumsOverOutputs(Mutant, caught_by=LOSSES):
    class Learner(ScaledLosses):
        def factor(self, prediction):
            is_class = self.settings.loss == "cross_entropy"
            return 1.0 if is_class else float(prediction.shape[-1])


class HalvesSquares(Mutant, caught_by=LOSSES):
    class Learner(ScaledLosses):
        def factor(self, prediction):
            return 0.5 if self.settings.loss == "mse" else 1.0


class TakesExponentialsOfLogits(Mutant, caught_by=LOSSES):
    class Learner(NetworkLearner):
        def _losses(self, prediction, y):
            if self.settings.loss == "cross_entropy":
                prediction = xp.clip(prediction, -88, 88)
            return super()._losses(prediction, y)


class LimitsProbabilities(Mutant, caught_by=LOSSES):
    class Learner(NetworkLearner):
        """Takes the logarithm of a probability that is at least a ten-millionth, as Keras does."""

        def _losses(self, prediction, y):
            losses, errors, counts = super()._losses(prediction, y)
            if self.settings.loss == "bce":
                losses = xp.clip(losses, 0, 16.2)
            return losses, errors, counts
