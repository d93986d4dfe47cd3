"""Each requirement says what it asks, why and by which source, and a failure prints that."""

import re
from collections import Counter

import d2ldev_conformance.suite.tensors.test_copying as copying
import pytest
from d2ldev_conformance.catalogue import list_explanations
from d2ldev_conformance.explanation import PAGE, describe, explain
from d2ldev_conformance.requirement import SOURCES, requirement
from test_documents import DOCUMENTS, ROOT, anchors

from d2ldev.framework.testing import MODULES

EXPLANATIONS = list_explanations()


def test_the_requirements_of_every_module_are_found():
    assert {each.file.module for each in EXPLANATIONS} == {*MODULES}
    assert len({each.id for each in EXPLANATIONS}) > 500


@pytest.mark.parametrize("name", ["asks", "reason"])
def test_every_requirement_says_what_it_asks_and_why(name):
    texts = {each: getattr(each, name) for each in EXPLANATIONS}
    bad = [each.id for each, text in texts.items() if not re.fullmatch(r"[A-Z0-9`].{14,}\.", text)]
    assert bad == []


def test_every_requirement_has_a_source():
    assert [each.id for each in EXPLANATIONS if not (each.source and each.link)] == []


def test_what_is_asked_is_one_sentence_that_begins_with_the_verb():
    bad = [each.asks for each in EXPLANATIONS if not re.match(r"[A-Z][a-z]+ ", each.asks)]
    bad += [each.asks for each in EXPLANATIONS if re.search(r"[.!?] [A-Z]", each.asks)]
    assert bad == []


def test_no_two_requirements_ask_the_same():
    asked = {(each.asks, each.file.module, each.id) for each in EXPLANATIONS}
    counts = Counter((asks, module) for asks, module, _ in asked)
    assert [asks for (asks, _), count in counts.items() if count > 1] == []


def test_a_reason_of_many_requirements_stands_once_at_the_top_of_their_file():
    counts = Counter(each.reason for each in EXPLANATIONS if each.reason != each.file.reason)
    assert [reason for reason, count in counts.items() if count > 3] == []


def test_every_source_is_named_by_a_requirement_and_every_page_is_there():
    named = {each.link for each in EXPLANATIONS}
    for source, link in SOURCES.items():
        assert source == "D2L" or link in named, source
        if link and not link.startswith("https://"):
            page, _, anchor = link.partition("#")
            path = ROOT / "docs" / page
            assert not anchor or anchor in anchors(path), link


def test_a_source_that_is_not_in_the_list_is_refused():
    with pytest.raises(ValueError, match="no source of requirements: 'a blog'"):
        requirement("copy.to-moves", section="6.7.2.2", source="a blog")


def test_a_requirement_without_a_text_is_found():
    """No text of another test, and no default, takes its place."""

    @requirement("copy.to-moves", section="6.7.2.2")
    def test_to_moves(backend):
        pass

    test_to_moves.__module__ = copying.__name__
    found = explain(test_to_moves)
    assert found.asks == ""
    assert found.reason == copying.__doc__.split("\n\n")[1].replace("\n", " ").strip()


def test_a_reason_and_a_source_of_its_own_go_before_those_of_the_file():
    found = explain(copying.test_a_tensor_already_on_the_device_is_returned_itself)
    assert found.reason == "The book promises that nothing is copied then."
    assert (found.source, found.file.source) == ("D2L 6.7.2.2", "contract")


def test_the_page_has_an_anchor_for_each_requirement():
    ids = re.findall(r'<a id="([^"]+)"></a>', DOCUMENTS[PAGE.removeprefix("docs/")])
    assert sorted(ids) == sorted({each.id for each in EXPLANATIONS})


def test_what_a_failure_prints_ends_with_the_address_of_its_documentation():
    lines = describe(copying.test_to_moves_a_tensor).splitlines()
    assert lines[0] == "Return from ``to`` a tensor on the given device."
    assert lines[2:] == ["source: D2L 6.7.2.2", f"docs: {PAGE}#copy.to-moves"]
