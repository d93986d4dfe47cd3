"""Programs of the documents that are for any framework, on the reference backend."""

from pages import parametrize_pages, run_page


@parametrize_pages("reference")
def test_the_programs_of_a_page_run(page, tmp_path):
    run_page(page, "reference", tmp_path)
