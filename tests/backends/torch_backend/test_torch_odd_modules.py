"""Modules that misbehave: placed whole, or refused by name and left as they were."""

import pytest
import torch

from d2ldev import UnsupportedValueError


class Half(torch.nn.Module):
    """Its parent's ``__init__`` was forgotten."""

    def __init__(self):
        pass


class Locked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.mask = torch.ones(2)
        self.__dict__["locked"] = True

    def __setattr__(self, name, value):
        if "locked" in self.__dict__:
            raise RuntimeError("nothing is set here")
        super().__setattr__(name, value)


class Unwalkable(dict):
    def values(self):
        raise RuntimeError("no values today")


def test_a_module_that_is_not_made_whole_is_refused_by_name(ledger):
    layer = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedValueError, match="the Half at odd cannot be looked through"):
        ledger.place({"layer": layer, "odd": Half()}, "gpu:0")
    assert set(map(str, ledger.placement(layer).values())) == {"cpu"}


def test_a_module_that_lets_nothing_be_set_is_placed(ledger):
    placement = ledger.placement(ledger.place(Locked(), "gpu:0"))
    assert {name: str(place) for name, place in placement.items()} == {
        "layer.weight": "gpu:0",
        "layer.bias": "gpu:0",
        "mask": "gpu:0",
    }


def test_a_module_with_a_container_that_cannot_be_walked_is_refused_by_name(ledger):
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].kept = Unwalkable(a=1)
    with pytest.raises(UnsupportedValueError, match=r"the Unwalkable at 0\.kept cannot be taken"):
        ledger.place(module, "gpu:0")


def test_a_cycle_in_a_module_is_told_by_the_attribute_that_holds_it(ledger):
    module = torch.nn.Linear(1, 1)
    module.kept = [torch.ones(1)]
    module.kept.append(module.kept)
    with pytest.raises(UnsupportedValueError, match=r"the list at kept\.1 contains itself"):
        ledger.place(module, "gpu:0")
    assert set(map(str, ledger.placement(module).values())) == {"cpu"}


def test_modules_nested_deeper_than_python_follows_are_refused(ledger):
    module = torch.nn.Linear(1, 1)
    for _ in range(2000):
        module = torch.nn.Sequential(module)
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        ledger.place(module, "gpu:0")
