"""The papers' tables, by hand."""

from stratified.evaluation import tables


def score(exact, f1=None, **fields):
  return {
    "count": 10,
    "failed": 0,
    "exact_match": exact,
    "f1": exact if f1 is None else f1,
    "searches_mean": 1.5,
    "invalid_actions": 0.0,
    "tokens_mean": 20.0,
  } | fields


RAG = {
  "label": "RAG",
  "sets": {"popqa": score(0.387), "nq": score(0.348), "mine": score(0.5)},
  "average": {"exact_match": 0.41, "f1": 0.41, "exact_match_micro": 0.39},
}
ONE = {"label": "a_b | 50%", "sets": {"nq": score(0.4)}, "average": {"exact_match": 0.4}}


def test_sets_stand_in_the_papers_order_and_others_after_them():
  names = [
    "bamboogle",
    "zoo",
    "musique",
    "nq",
    "2wikimultihopqa",
    "nq",
    "ant",
    "triviaqa",
    "hotpotqa",
    "popqa",
  ]
  assert tables.ordered(names) == [
    "nq",
    "triviaqa",
    "popqa",
    "hotpotqa",
    "2wikimultihopqa",
    "musique",
    "bamboogle",
    "zoo",
    "ant",
  ]


def test_markdown_has_dashes_where_a_row_was_not_evaluated_and_no_average_of_unlike_sets():
  assert tables.markdown([RAG, ONE]) == (
    "| exact match x 100 | NQ | PopQA | mine | average | micro |\n|---|---|---|---|---|---|\n"
    "| RAG | 34.8 | 38.7 | 50.0 | 41.0 | 39.0 |\n| a_b \\| 50% | 40.0 | - | - | - | - |"
  )
  assert "| F1 x 100 |" in tables.markdown([RAG], "f1")


def test_latex_is_escaped_and_the_best_is_bold():
  assert tables.latex([RAG, ONE]) == "\n".join(
    [
      r"\begin{tabular}{lccccc}",
      r"\toprule",
      r"Method & NQ & PopQA & mine & Avg. & micro \\",
      r"\midrule",
      r"RAG & 34.8 & \textbf{38.7} & \textbf{50.0} & \textbf{41.0} & \textbf{39.0} \\",
      r"a\_b | 50\% & \textbf{40.0} & - & - & - & - \\",
      r"\bottomrule",
      r"\end{tabular}",
    ]
  )
  assert "textbf" not in tables.latex([RAG])
  assert r"\textbackslash{}\{x\}\textasciitilde{}" in tables.latex([ONE | {"label": "\\{x}~"}])


def test_a_set_that_nobody_answered_is_a_dash():
  lost = {
    "label": "x",
    "sets": {"nq": score(None, failed=3, count=0, searches_mean=None)},
    "average": {},
  }
  assert "| x | - | - |" in tables.markdown([lost]) and "& - & -" in tables.latex(
    [lost, RAG | {"sets": {}}]
  )
  assert "| NQ | all | 0 | 3 | - | - | - | - | - | 0.00 | 20.00 |" in tables.details(lost)


def test_details_tell_hops_and_intervals():
  parts = {"2": score(0.25, exact_match_interval=[0.1, 0.4]), "1": score(0.5)}
  text = tables.details(
    {"label": "x", "sets": {"musique": score(0.3, by_hops=parts)}, "average": {}}
  )
  assert [line.split(" | ")[:2] for line in text.splitlines()[2:]] == [
    ["| MuSiQue", "all"],
    ["| MuSiQue", "1"],
    ["| MuSiQue", "2"],
  ]
  assert "25.0 | 10.0 to 40.0" in text


def test_a_comparison_tells_small_p_values_in_full():
  found = {
    "nq": {"count": 9, "difference": -0.05, "low": -0.1, "high": 0.01, "p_permutation": 0.25},
    "average": {
      "count": 20,
      "difference": 0.1,
      "low": 0.05,
      "high": 0.15,
      "only_a": 30,
      "only_b": 2,
      "p_mcnemar": 2.5e-7,
      "p_permutation": 1e-4,
    },
  }
  lines = tables.comparison("ours", "theirs", found).splitlines()
  assert lines[2] == "| NQ | 9 | -5.0 | -10.0 to 1.0 | - | - | - | 0.2500 |"
  assert lines[3] == "| average | 20 | +10.0 | 5.0 to 15.0 | 30 | 2 | 2.5e-07 | 0.0001 |"


def test_bamboogle_is_left_out_of_a_mean_of_its_own_and_families_are_told():
  average = {"exact_match": 0.5, "exact_match_without_bamboogle": 0.4, "exact_match_micro": 0.41}
  row = {"label": "x", "sets": {"nq": score(0.4), "bamboogle": score(0.6)}, "average": average}
  text = tables.markdown([row | {"family": "one context"}, row | {"label": "y"}])
  assert text == (
    "| exact match x 100 | NQ | Bamboogle | average | without Bamboogle | micro | family |\n"
    "|---|---|---|---|---|---|---|\n"
    "| x | 40.0 | 60.0 | 50.0 | 40.0 | 41.0 | one context |\n"
    "| y | 40.0 | 60.0 | 50.0 | 40.0 | 41.0 | - |"
  )
  text = tables.latex([row | {"family": "one context"}])
  assert r"\begin{tabular}{lcccccl}" in text
  assert r"Avg. & without Bamboogle & micro & Family \\" in text
  assert r"x & 40.0 & 60.0 & 50.0 & 40.0 & 41.0 & one context \\" in text
  # a single set has one mean
  assert "micro" not in tables.markdown([{"label": "x", "sets": {"nq": score(0.4)}, "average": {}}])
