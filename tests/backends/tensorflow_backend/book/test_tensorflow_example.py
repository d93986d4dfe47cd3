"""``examples/images_keras.py`` learns on the CPU and on a virtual GPU, and goes on."""

from example_runs import check_example


def test_the_program_learns_on_each_device_and_goes_on_with_the_same_numbers():
    check_example("images_keras")
