// The scores of the site's search: "html_search_scorer" of Sphinx.
var Scorer = {
  // The requirements name every subject once, and the decisions many. A page about it comes first:
  // its heading is what was searched for, and not only has a word of it. So does a method that users
  // call, before one of the same name that authors of backends write.
  score: ([page, , , , score, , kind]) => {
    if (page === "docs/requirements") return score - 1000;
    if (page.startsWith("docs/decisions/")) return score - 100;
    if (page === "docs/api/interface" || page === "docs/api/framework") return score - 100;
    return kind === "title" ? score + 30 : score;
  },
  // A heading is what its page is about. It comes before a name that only has the word in it.
  title: 30,
  partialTitle: 7,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  term: 5,
  partialTerm: 2,
};
