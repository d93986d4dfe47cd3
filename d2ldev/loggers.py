"""The callbacks that log the numbers of each epoch.

>>> from d2ldev.loggers import CSVLogger
>>> trainer = d2ldev.Trainer(10, callbacks=CSVLogger('run.csv'))

Held by ``tests/core/training/test_loggers.py``.
"""

from d2ldev.training.loggers import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
