"""Programs of the documents that are for all frameworks in one process."""

from pages import parametrize_pages, run_page


@parametrize_pages("all")
def test_the_programs_of_a_page_run(page, tmp_path):
    run_page(page, "all", tmp_path)
