"""Programs of the documents that are for TensorFlow."""

from pages import parametrize_pages, run_page


@parametrize_pages("tensorflow")
def test_the_programs_of_a_page_run(page, tmp_path):
    run_page(page, "tensorflow", tmp_path)
