"""The table for those who come from Ivy, which is of no framework."""

from coming_from import run_our_lines


def test_our_lines_run(tmp_path):
    run_our_lines("reference", "Ivy", folder=tmp_path)
