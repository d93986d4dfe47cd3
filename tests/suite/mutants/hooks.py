"""Mutants with another Trainer: one that does not call what the user gave it."""

from __future__ import annotations

from d2ldev.training import trainer
from d2ldev.training.trainer import Trainer
from mutants import Mutant
from mutants.provision import NetworkLearner


def _replace(name, function):
    """Replace a method of the Trainer, in this process, in which no other mutant runs."""
    setattr(Trainer, name, function)


# -- hooks ----------------------------------------------------------------------------------------


class Patched(dict):
    """The Trainer's hooks, as they are when somebody looks."""

    def __getitem__(self, name):
        return getattr(Trainer, name)


class ComparesHooksTooLate(Mutant, caught_by="hooks.patched-onto-the-class"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        trainer._HOOKS = Patched()


class SetsItsModelOnlyItself(Mutant, caught_by="hooks.the-books-trainer"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        Trainer.model = Trainer.model.getter(Trainer.model.fget).setter(lambda *_: None)


class TakesNoneForABatch(Mutant, caught_by="hooks.that-return-none"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        _replace("_prepared_batch", lambda self, batch: self.prepare_batch(batch) or batch)


# -- modules --------------------------------------------------------------------------------------


class ComparesItself(Mutant, caught_by="module.its-steps"):
    class Learner(NetworkLearner):
        def evaluate(self, inputs, y):
            loss, prediction = super().evaluate(inputs, y)
            return (loss, prediction) if self.settings.methods is None else (loss / 3.0, prediction)


class TakesALossForAModule(Mutant, caught_by="module.ignores-nothing"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        own_settings = trainer.own_settings
        trainer.own_settings = lambda model, _loss, optimizer, _metrics: own_settings(
            model, None, optimizer, ()
        )
