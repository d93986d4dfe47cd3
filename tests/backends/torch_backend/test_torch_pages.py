"""Programs of the documents that are for PyTorch."""

from pages import parametrize_pages, run_page


@parametrize_pages("torch")
def test_the_programs_of_a_page_run(page, tmp_path):
    run_page(page, "torch", tmp_path)
