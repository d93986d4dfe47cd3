"""Labels of sequences, with the framework's own model."""

from sequences import assert_the_loss_is_the_mean_over_all_labels


def test_cross_entropy_is_the_mean_over_all_labels_of_sequences(backend):
    net = backend.mlp([2, 3])
    assert_the_loss_is_the_mean_over_all_labels(backend, net)
