"""``torch.Generator`` on a virtual GPU, and the operators that draw by one."""

import copy
import pickle

import pytest
import torch

from d2ldev.errors import DeviceMismatchError, DeviceUnavailableError

# -- generators ------------------------------------------------------------------------------------


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


def test_a_class_of_the_users_may_derive_from_it(virtual):
    class Mine(torch.Generator):
        pass

    assert isinstance(Mine(), Mine)
    assert not isinstance(torch.Generator(), Mine)
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


# -- drawing ---------------------------------------------------------------------------------------


DEVICES = ("cpu", "vgpu:0", "vgpu:1")
MIXED = [(one, other) for one in DEVICES[1:] for other in DEVICES if one != other]
DRAWING = {
    "randn": lambda place, g: torch.randn(2, device=place, generator=g),
    "rand": lambda place, g: torch.rand(2, device=place, generator=g),
    "randint": lambda place, g: torch.randint(3, (2,), device=place, generator=g),
    "randperm": lambda place, g: torch.randperm(3, device=place, generator=g),
    "normal": lambda place, g: torch.normal(torch.ones(2, device=place), 1.0, generator=g),
    "normal_": lambda place, g: torch.empty(2, device=place).normal_(generator=g),
    "poisson": lambda place, g: torch.poisson(torch.ones(2, device=place), generator=g),
    "bernoulli": lambda place, g: torch.bernoulli(torch.ones(2, device=place), generator=g),
    "multinomial": lambda place, g: torch.multinomial(torch.ones(3, device=place), 2, generator=g),
    "out": lambda place, g: torch.rand(2, out=torch.empty(2, device=place), generator=g),
    "init": lambda place, g: torch.nn.init.uniform_(torch.empty(2, device=place), generator=g),
}
DRAWN = pytest.mark.parametrize("draw", DRAWING.values(), ids=DRAWING)


@DRAWN
@pytest.mark.parametrize("place", DEVICES)
def test_they_are_drawn_by_a_generator_of_their_own_device(virtual, draw, place):
    drawn = draw(place, torch.Generator(place).manual_seed(1))
    assert str(drawn.device) == place
    assert torch.equal(drawn.cpu(), draw("cpu", torch.Generator().manual_seed(1)))


@DRAWN
@pytest.mark.parametrize(("place", "other"), MIXED)
def test_a_generator_of_another_device_is_refused(virtual, draw, place, other):
    with pytest.raises(DeviceMismatchError, match="by a generator on"):
        draw(place, torch.Generator(other))


def test_a_refused_generator_has_drawn_nothing(virtual):
    generator = torch.Generator("vgpu:1").manual_seed(1)
    before = generator.get_state()
    with pytest.raises(DeviceMismatchError):
        torch.randn(2, device="vgpu:0", generator=generator)
    assert torch.equal(generator.get_state(), before)


def test_the_error_names_both_devices(virtual):
    with pytest.raises(RuntimeError) as caught:
        torch.randn(2, device="vgpu:1", generator=torch.Generator())
    assert caught.value.devices == ("gpu:1", "cpu")
    assert "drawn on gpu:1, by a generator on cpu" in str(caught.value)
    assert "torch.Generator(backend.native('gpu:1'))" in caught.value.fix


def test_in_a_strict_block_it_is_the_same_error(virtual):
    with pytest.raises(DeviceMismatchError, match="a generator on gpu:1"), virtual.strict():
        torch.randn(2, device="vgpu:0", generator=torch.Generator("vgpu:1"))


def test_the_cpu_s_operators_take_it_for_their_own(vgpu):
    split = torch.utils.data.random_split
    parts = split(range(9), [6, 3], generator=torch.Generator(vgpu))
    assert [len(part) for part in parts] == [6, 3]
