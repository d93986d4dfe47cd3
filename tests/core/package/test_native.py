"""What the book's chapters take from ``d2l``, on any backend."""

import pickle

import pytest
from installs import find_extras
from processes import FRAMEWORKS, make_backend, run_python

import d2ldev
from d2ldev.framework.testing import framework_of
from d2ldev.native import NativeDevices
from d2ldev.native import reference as d2l


def test_the_functions_return_the_framework_s_own_devices(reference):
    assert [d2l.cpu(), d2l.gpu(), d2l.gpu(1)] == [
        reference.native(device) for device in ("cpu", "gpu:0", "gpu:1")
    ]


def test_try_gpu_of_an_existing_gpu_is_that_gpu(reference):
    assert d2l.try_gpu(1) == reference.native("gpu:1")


def test_try_gpu_of_a_missing_gpu_is_the_cpu(reference):
    assert d2l.try_gpu(10) == reference.native("cpu")


def test_all_gpus_are_a_list(reference):
    assert d2l.try_all_gpus() == [reference.native("gpu:0"), reference.native("gpu:1")]


def test_without_gpus_the_list_is_the_cpu(reference):
    none = NativeDevices(d2ldev.Backend(type(framework_of(reference))(virtual_gpus=0)))
    assert (none.num_gpus(), none.try_all_gpus()) == (0, [reference.native("cpu")])


def test_a_missing_gpu_without_a_native_object_is_an_error():
    with pytest.raises(d2ldev.DeviceUnavailableError, match="gpu:2"):
        d2l.gpu(2)


def test_a_missing_gpu_has_the_native_object_of_the_framework(reference, monkeypatch):
    monkeypatch.setattr(
        framework_of(reference).devices, "native_of_missing", lambda device: f"its own {device}"
    )
    assert d2l.gpu(2) == "its own gpu:2"


@pytest.mark.parametrize("function", [d2l.gpu, d2l.try_gpu])
def test_a_negative_index_is_invalid(function):
    with pytest.raises(d2ldev.InvalidDeviceError):
        function(-1)


def test_a_function_is_added_to_a_class_as_in_the_book():
    class Model:
        pass

    @d2l.add_to_class(Model)
    def double(self, x):
        return 2 * x

    assert double(None, 1) == 2
    assert Model().double(3) == 6


def test_a_batch_is_moved_to_a_device_as_the_framework_has_it(reference):
    X, y = (d2l.to(x, d2l.gpu(1)) for x in (reference.ones((2, 3)), reference.zeros(2)))  # noqa: N806
    assert {reference.device_of(x) for x in (X, y)} == {d2ldev.gpu(1)}


def test_the_trainer_trains_on_the_backend_that_it_was_taken_from(reference):
    with d2ldev.use_backend(d2ldev.Backend(type(framework_of(reference))(virtual_gpus=1))):
        trainer = d2l.Trainer(2, num_gpus=1)
    assert trainer.backend is reference
    assert isinstance(trainer, d2ldev.Trainer)


def test_add_to_class_changes_only_one_handles_trainer(reference):
    mine, others = (NativeDevices(reference) for _ in range(2))

    @mine.add_to_class(mine.Trainer)
    def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):  # noqa: N807
        self.save_hyperparameters()
        self.gpus = [mine.gpu(i) for i in range(min(num_gpus, mine.num_gpus()))]

    @mine.add_to_class(mine.Trainer)
    def prepare_batch(self, batch):
        return [mine.to(a, self.gpus[0]) for a in batch]

    trainer = mine.Trainer(max_epochs=1, num_gpus=7)
    assert [trainer.gpus, trainer.num_gpus] == [mine.try_all_gpus(), 7]
    assert reference.device_of(trainer.prepare_batch([reference.ones(2)])[0]) is d2ldev.gpu(0)
    assert mine.Trainer is mine.Trainer is not others.Trainer
    for each in (d2ldev.Trainer, others.Trainer):
        assert each.__init__ is not __init__
        assert each.prepare_batch is not prepare_batch


def test_another_process_finds_the_trainer_and_the_data_by_their_names():
    from d2ldev.native import reference as again

    assert again is d2l
    for each in (d2l.Trainer, d2l.DataModule, d2l.HyperParameters):
        assert pickle.loads(pickle.dumps(each)) is each


def test_arguments_become_attributes_as_in_the_book():
    class Data(d2l.DataModule):
        def __init__(self, batch_size, _scale=1, ignored=2):
            super().__init__(root="data")
            self.save_hyperparameters(ignore=["ignored"])

        def get_dataloader(self, train):
            return [train, self.batch_size]

    data = Data(8)
    assert [data.root, data.num_workers, data.hparams] == ["data", 4, {"batch_size": 8}]
    assert not hasattr(data, "ignored")
    assert [data.train_dataloader(), data.val_dataloader()] == [[True, 8], [False, 8]]


def test_the_error_names_the_loader_that_a_data_module_lacks():
    class Data(d2l.DataModule):
        pass

    with pytest.raises(NotImplementedError, match=r"get_dataloader\(self, train\): ... in Data"):
        Data().train_dataloader()


def test_the_error_names_the_loss_or_optimizer_that_a_module_lacks():
    from d2ldev.training.book import ModuleMethods

    class Net(ModuleMethods):
        pass

    with pytest.raises(NotImplementedError, match=r"loss\(self, y_hat, y\): ... in Net"):
        Net().loss(1, 2)
    with pytest.raises(NotImplementedError, match=r"configure_optimizers\(self\): ... in Net"):
        Net().configure_optimizers()


def test_a_framework_without_models_has_no_module():
    with pytest.raises(d2ldev.UnsupportedValueError, match="no class of models"):
        d2l.Module  # noqa: B018


@pytest.mark.parametrize("name", ["MLP", "FashionMNIST", "SyntheticRegressionData"])
def test_the_error_says_which_names_are_only_in_the_books_package(name):
    with pytest.raises(AttributeError) as caught:
        getattr(d2l, name)
    assert str(caught.value) == (
        f"d2ldev.native has no {name!r}. It has DataModule, HyperParameters, Module, Trainer, "
        "add_to_class, cpu, gpu, num_gpus, to, try_all_gpus, try_gpu; all else is in the book's "
        "own package (pip install d2l), see docs/d2l.md"
    )


def test_a_board_keeps_the_means_of_the_points_that_it_is_given():
    from d2ldev.training.book import ProgressBoard

    board = ProgressBoard()
    for i in range(5):
        board.draw(i, 10.0 * i, "train_loss", every_n=2)
    board.draw(1, 3.0, "val_loss")
    assert board.points == {"train_loss": [(0.5, 5.0), (2.5, 25.0)], "val_loss": [(1.0, 3.0)]}


def test_the_functions_name_their_backend():
    assert repr(d2l) == "<the native devices of reference>"


def test_importing_the_module_imports_no_framework():
    code = f"""
        import sys, d2ldev.native
        show(sorted(set({FRAMEWORKS}) & set(sys.modules)))
    """
    assert run_python(code, hide=()) == [[]]


def test_a_third_party_s_backend_is_found_by_name(tmp_path):
    code = "from d2ldev.native import mine as d2l; show([d2l.num_gpus(), repr(d2l.try_gpu(1))])"
    (shown,) = run_python(code, path=[make_backend(tmp_path)])
    assert shown == [2, "array_api_strict.Device('device2')"]


@pytest.mark.parametrize("name", ["torhc", "pytroch", "tensorlfow", "jx", "mxnt", "referense"])
def test_a_misspelt_name_lists_the_choices(name):
    with pytest.raises(d2ldev.UnknownBackendError, match="known: torch, jax, tensorflow, mxnet"):
        exec(f"from d2ldev.native import {name}")


@pytest.mark.parametrize("name", ["__path__", "expit", "max", "try_gpu"])
def test_a_name_that_is_like_no_backend_s_is_an_attribute_error(name):
    # pickle asks every module for the function that it is about to write.
    with pytest.raises(AttributeError, match=f"{name}'; known: torch, jax, tensorflow, mxnet"):
        getattr(d2ldev.native, name)


def test_a_missing_framework_is_named_with_its_install_line():
    code = """
        import d2ldev
        try:
            from d2ldev.native import pytorch as d2l
        except d2ldev.BackendNotInstalledError as error:
            show(error.fix)
    """
    (fix,) = run_python(code)
    assert find_extras(fix) == ["torch"]
