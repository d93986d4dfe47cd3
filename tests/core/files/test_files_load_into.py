"""A file is read into what is there: all of it, or nothing."""

import collections

import numpy as np
import pytest
from safetensors.numpy import save_file
from saved_files import values

from d2ldev import CheckpointError, UnsupportedValueError

Point = collections.namedtuple("Point", "x y")


def test_a_nesting_is_rebuilt_with_the_values_of_the_file(reference, path):
    reference.save({"at": [Point(reference.ones(2), np.ones(3))], "step": 7, "best": 0.5}, path)
    mine = {"at": [Point(reference.zeros(2), np.zeros(3))], "step": 0, "best": None}
    loaded = reference.load_into(mine, path)
    assert values(reference, loaded["at"][0].x) == [1, 1]
    assert type(loaded["at"][0]) is Point
    assert loaded["at"][0].y.tolist() == [1, 1, 1]
    assert (loaded["step"], loaded["best"]) == (7, 0.5)
    assert values(reference, mine["at"][0].x) == [0, 0]
    assert mine["step"] == 0


def test_tensors_that_are_separate_stay_separate(reference, path):
    x = reference.ones(2)
    reference.save([x, x], path)
    first, second = reference.load_into([reference.zeros(2), reference.zeros(2)], path)
    assert first is not second
    assert values(reference, first) == values(reference, second) == [1, 1]


def test_an_array_that_stands_twice_is_two_afterwards_if_the_file_has_two(reference, path):
    reference.save([np.ones(2), {"x": np.zeros(2)}], path)
    x = np.full(2, 5.0)
    first, other = reference.load_into([x, {"x": x}], path)
    assert (first.tolist(), other["x"].tolist()) == ([1, 1], [0, 0])
    assert x.tolist() == [5, 5]


def test_everything_that_does_not_fit_is_listed(reference, path):
    reference.save(
        {"a": reference.ones(2), "b": reference.ones(2, dtype="int32"), "more": 1, "n": 1}, path
    )
    mine = {"a": reference.zeros(3), "b": reference.zeros(2), "less": [reference.zeros(1)], "n": ""}
    with pytest.raises(CheckpointError) as caught:
        reference.load_into(mine, path)
    assert "it lacks less.0; it has unexpected more" in caught.value.problem
    assert "a is float32 (3,), and the file has float32 (2,)" in caught.value.problem
    assert "b is float32 (2,), and the file has int32 (2,)" in caught.value.problem
    assert "n is a str, and the file has 1, of type int" in caught.value.problem


def test_a_target_without_tensors_has_its_own_error(reference, path):
    reference.save({"a": reference.ones(2)}, path)
    with pytest.raises(
        CheckpointError, match="unexpected a; the object holds no tensors"
    ) as caught:
        reference.load_into({}, path)
    assert caught.value.fix.startswith("give what was saved, or what holds its tensors: params")


def test_many_names_that_are_missing_are_counted(reference, path):
    reference.save({}, path)
    with pytest.raises(CheckpointError, match="x9 and 90 more"):
        reference.load_into({f"x{i}": i for i in range(100)}, path)


@pytest.mark.parametrize("other", [1, [1], {"b": 1}, None], ids=repr)
def test_another_nesting_is_refused(reference, path, other):
    reference.save(other, path)
    with pytest.raises(CheckpointError):
        reference.load_into({"a": reference.zeros(2)}, path)


def test_values_that_no_file_holds_are_refused(reference, path):
    reference.save([1], path)
    with pytest.raises(UnsupportedValueError, match="at 0"):
        reference.load_into([object()], path)


def test_a_list_that_is_shared_stays_so(reference, path):
    shared = [reference.ones(2), 1]
    reference.save({"a": shared, "b": (shared,)}, path)
    mine = [reference.zeros(2), 0]
    loaded = reference.load_into({"a": mine, "b": (mine,)}, path)
    assert loaded["a"] is loaded["b"][0]
    assert loaded["a"][1] == 1


def test_load_into_returns_an_equal_target_itself(reference, path):
    mine = {"n": [1, "a", None, 2.5], "empty": ()}
    reference.save(mine, path)
    assert reference.load_into(mine, path) is mine


def test_a_foreign_file_is_read_into_a_pytree_by_its_dotted_names(reference, path):
    save_file({"layers.0.w": np.ones(2, "float32")}, path)
    loaded = reference.load_into({"layers": [{"w": reference.zeros(2)}]}, path)
    assert values(reference, loaded["layers"][0]["w"]) == [1, 1]


def test_arrays_are_read_by_their_dotted_names_too(reference, path):
    save_file({"at.0": np.ones(2, "float32"), "b": np.ones(1)}, path)
    mine = {"at": [reference.zeros(2)], "b": np.zeros(1), "n": 3, "s": np.float32(1)}
    loaded = reference.load_into(mine, path)
    assert values(reference, loaded["at"][0]) == [1, 1]
    assert loaded["b"].tolist() == [1]
    assert (loaded["n"], loaded["s"]) == (3, 1)
    assert mine["b"].tolist() == [0]


@pytest.fixture
def foreign(path):
    """A file of another program, with the names of an encoder and a decoder."""
    names = ("encoder.0.w", "encoder.1.w", "decoder.w")
    save_file({name: np.full(2, i, "float32") for i, name in enumerate(names)}, path)
    return path


def test_a_prefix_of_another_program_s_names_is_a_part(reference, foreign):
    mine = {"0": {"w": reference.zeros(2)}, "1": {"w": reference.zeros(2)}}
    loaded = reference.load_into(mine, foreign, only="encoder")
    assert values(reference, loaded["1"]["w"]) == [1, 1]


def test_a_part_that_would_fit_is_the_fix(reference, path):
    save_file({"module.0.w": np.ones(2, "f4"), "module.1.w": np.ones(2, "f4")}, path)
    mine = {"0": {"w": reference.zeros(2)}, "1": {"w": reference.zeros(2)}}
    with pytest.raises(CheckpointError, match=r"fix: backend\.load_into\(\.\.\., only='module'\)"):
        reference.load_into(mine, path)


def test_the_model_beside_an_optimizer_is_the_fix(reference, path):
    net = reference.mlp([2, 1])
    reference.save({"net": net, "state": {"step": reference.zeros(2)}}, path)
    with pytest.raises(CheckpointError, match=r"fix: backend\.load_into\(\.\.\., only='net'\)"):
        reference.load_into(net, path)
    reference.load_into(net, path, only="net")


def test_a_file_of_one_of_the_values_names_that_value(reference, path):
    net = reference.mlp([2, 1])
    reference.save(net, path)
    with pytest.raises(CheckpointError, match="fix: load it into the value at 'net' of the object"):
        reference.load_into({"net": net, "state": {"step": reference.zeros(2)}}, path)


def test_a_part_that_fits_only_partly_is_not_suggested(reference, path):
    save_file({"module.0.w": np.ones(2, "f4"), "other.1.w": np.ones(2, "f4")}, path)
    mine = {"0": {"w": reference.zeros(2)}, "1": {"w": reference.zeros(2)}}
    with pytest.raises(CheckpointError, match=r"fix: backend\.load\(path\)"):
        reference.load_into(mine, path)


def test_one_tensor_is_a_part(reference, foreign):
    assert values(
        reference, reference.load_into(reference.zeros(2), foreign, only="decoder.w")
    ) == [
        2,
        2,
    ]


@pytest.mark.parametrize("only", ["encode", "encoder.", "encoder.0.w.x", "", "decoder.w.w"])
def test_an_invalid_part_is_refused(reference, foreign, only):
    with pytest.raises(CheckpointError):
        reference.load_into({"w": reference.zeros(2)}, foreign, only=only)


def test_an_invalid_name_of_a_part_is_refused(reference, foreign):
    with pytest.raises(UnsupportedValueError, match="only=3, an int, is not a name"):
        reference.load_into({"w": reference.zeros(2)}, foreign, only=3)


def test_a_part_is_read_as_strictly(reference, foreign):
    with pytest.raises(CheckpointError, match=r"it has unexpected 1\.w"):
        reference.load_into({"0": {"w": reference.zeros(2)}}, foreign, only="encoder")


def test_another_shape_is_refused_also_where_not_everything_has_to_match(reference, path):
    reference.save({"a": reference.ones(2), "b": reference.ones(3)}, path)
    mine = {"a": reference.zeros(2), "b": reference.zeros(4)}
    with pytest.raises(CheckpointError, match=r"these do not fit: b is float32 \(4,\)"):
        reference.load_into(mine, path, strict=False)
    assert values(reference, mine["a"]) == [0, 0]


def test_items_of_a_list_beyond_the_file_stay(reference, path):
    reference.save([reference.ones(2)], path)
    mine = [reference.zeros(2), reference.zeros(3)]
    value, matched, missing, unexpected = reference.load_into(mine, path, strict=False)
    assert (matched, missing, unexpected) == (["0"], ["1"], [])
    assert values(reference, value[0]) == [1, 1]
    assert value[1] is mine[1]


def test_the_nearest_long_name_ends_alike(reference, path):
    long = "model." * 50
    mine = (f"net.{long}gama", f"{long}bias")
    save_file({f"{long}{name}": np.zeros(1) for name in ("gamma", "bias")}, path)
    with pytest.raises(CheckpointError, match=f"net.{long}gama may be {long}gamma;"):
        reference.load_into({name: np.zeros(1) for name in mine}, path)


def test_a_mapping_with_a_part_of_the_tensors_is_read_if_it_may_lack_the_others(reference):
    net = reference.mlp([3, 2], seed=1)
    first, *others = reference.named_tensors(net)
    wanted = np.full(reference.named_tensors(net)[first].shape, 7, "float32")
    loaded = reference.load_into(net, {first: wanted, "other": wanted}, strict=False)
    assert (loaded.matched, loaded.missing, loaded.unexpected) == ([first], others, ["other"])
    assert (reference.to_numpy(reference.named_tensors(loaded.value)[first]) == 7).all()


def test_a_set_is_passed_over_where_only_tensors_have_names(reference):
    mine = {"x": reference.zeros(2), "seen": {"a"}}
    loaded = reference.load_into(mine, {"x": np.ones(2, "float32")})
    assert values(reference, loaded["x"]) == [1, 1]
    assert loaded["seen"] is mine["seen"]
