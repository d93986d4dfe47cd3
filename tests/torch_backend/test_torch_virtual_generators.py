"""``torch.Generator`` on a virtual GPU: the CPU's numbers, under the device that was asked for."""

import copy
import pickle

import pytest
import torch

from d2ldev.errors import DeviceUnavailableError


def test_it_draws_the_cpus_numbers(place):
    drawn = torch.randn(5, generator=torch.Generator(place).manual_seed(3), device=place)
    expected = torch.randn(5, generator=torch.Generator().manual_seed(3))
    assert drawn.device == place
    assert torch.equal(drawn.cpu(), expected)


def test_it_says_where_it_is(virtual, place):
    assert torch.Generator(device=place).device == place
    assert torch.Generator("vgpu").device == torch.device("vgpu:0")
    made = [torch.Generator(), torch.Generator(None), torch.Generator(device="cpu")]
    assert [str(one.device) for one in made] == ["cpu"] * 3


def test_it_is_not_made_where_there_is_no_device(virtual):
    with pytest.raises(DeviceUnavailableError):
        torch.Generator("vgpu:5")


def test_every_generator_of_torch_is_one(virtual):
    made = [torch.default_generator, torch.Generator(), torch.Generator("vgpu:1")]
    assert all(isinstance(one, torch.Generator) for one in made)
    assert not isinstance(3, torch.Generator)
    assert issubclass(type(torch.default_generator), torch.Generator)


def test_a_class_of_the_users_may_derive_from_it(virtual):
    class Mine(torch.Generator):
        pass

    assert isinstance(Mine(), Mine)
    assert not isinstance(torch.Generator(), Mine)
    assert not issubclass(torch.Generator, Mine)
    assert torch.equal(
        torch.rand(2, generator=Mine().manual_seed(1)),
        torch.rand(2, generator=torch.Generator().manual_seed(1)),
    )


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_copy_draws_on_from_the_same_state(place, copied):
    generator = torch.Generator(place).manual_seed(2)
    torch.rand(3, generator=generator, device=place)
    other = copied(generator)
    assert other.device == place
    drawn = [torch.rand(4, generator=one, device=place) for one in (generator, other)]
    assert torch.equal(*drawn)


def test_a_class_of_the_users_is_itself_on_a_virtual_gpu(place):
    class Mine(torch.Generator):
        pass

    made = Mine(device=place)
    assert type(made) is Mine
    assert made.device == place
    assert torch.equal(
        torch.rand(2, generator=made.manual_seed(1), device=place).cpu(),
        torch.rand(2, generator=torch.Generator().manual_seed(1)),
    )


def test_a_clone_is_where_it_is_and_draws_on_from_the_same_state(place):
    generator = torch.Generator(place).manual_seed(2)
    torch.rand(3, generator=generator, device=place)
    clone = generator.clone_state()
    assert clone.device == place
    assert clone.initial_seed() == 2
    drawn = [torch.rand(4, generator=one, device=place) for one in (generator, clone)]
    assert torch.equal(*drawn)


def test_a_clone_of_the_cpu_s_is_the_cpu_s(virtual):
    class Mine(torch.Generator):
        pass

    assert [str(one.clone_state().device) for one in (torch.Generator(), Mine())] == ["cpu"] * 2
