"""report.html: one page that needs nothing else, from whatever a workdir holds, with every text
harmless."""

import dataclasses
from html.parser import HTMLParser
import json
import pathlib
import re
import xml.etree.ElementTree

import programs
import pytest

from configs import search_r1
from stratified import files, strata
from stratified.reports import (
  alarms,
  axes,
  cycle_figures,
  filters,
  group_view,
  plots,
  run_figures,
  run_page,
  score_table,
  timelines,
  transcripts,
)
from stratified.reports import text as texts
from stratified.runs import claim
from stratified.runs import writer as metrics

VOID = {"meta", "input"}


class _Page(HTMLParser):
  """Tags that are balanced, their attributes, and the visible text."""

  def __init__(self, text):
    super().__init__(convert_charrefs=True)
    self.tags, self.attributes, self.text, self._open = [], [], "", []
    self.feed(text)
    self.close()
    assert not self._open, f"never closed: {self._open}"

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    if tag not in VOID:
      self._open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    self.text += data


def row(step, **changed):
  base = {
    "step": step,
    "reward/mean": 0.3 + 0.001 * step,
    "reward/exact_match": 0.3,
    "rollout/searches_mean": 1.5,
    "advantage/zero_share": 0.3,
    "policy/entropy": 0.4,
    "loss/kl": 0.01,
    "grad/norm": 1.0,
    "policy/logp_gap_mean": 0.001,
    "policy/logp_gap_max": 0.02,
    "rollout/failed": 0,
    "update/skipped": 0,
    "strata/share_0": 0.25,
    "strata/share_1": 0.5,
    "strata/share_2": 0.25,
    "time/rollout_s": 2.0,
    "time/update_s": 1.0,
    "time/step_s": 4.0,
  }
  return base | {key.replace("__", "/"): value for key, value in changed.items()}


ANSWERS = {0: "Paris", 1: "London"}  # reward -> answer


def record(**changed):
  return {
    "question": "Where was Ada born?",
    "golden_answers": ["London"],
    "hops": 1,
    "sample": 0,
    "searches": 1,
    "answer": "Paris",
    "stop": "answer",
    "fault": None,
    "reward": 0.0,
    "stratum": 1,
    "advantage": -0.71,
    "turns": [
      {
        "action": "search",
        "searches": [{"query": "ada birth", "outcome": "hit", "passage_ids": ["7", "9"]}],
      },
      {"action": "answer", "searches": []},
    ],
    "segments": [
      {"origin": "prompt", "text": "Question: Where was Ada born?", "tokens": 9},
      {"origin": "policy", "text": "<think>look</think>\n<search>ada birth</search>", "tokens": 8},
      {
        "origin": "observation",
        "tokens": 30,
        "text": "\n<information>Doc 1(Title: Ada (poet)) A poet.\n"
        "Doc 2(Title: Ada II) A queen.</information>",
      },
      {"origin": "policy", "text": "<answer>Paris</answer>", "tokens": 5},
    ],
  } | changed


def make_run(folder, rows, records=(), config=None, evaluation=None):
  with metrics.Writer(folder) as writer:
    for one in rows:
      writer.write(one)
    if records:
      writer.write_trajectories(rows[-1]["step"], records)
  if config is not None:
    (folder / "config.json").write_text(json.dumps(config))
  if evaluation is not None:
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
  return run_page.write(folder).read_text(encoding="utf-8")


def test_the_page_needs_nothing_beside_it(tmp_path):
  text = make_run(tmp_path, [row(step) for step in range(1, 30)], [record()], {"seed": 0})
  page = _Page(text)
  assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page.tags)
  assert not [
    (name, value)
    for name, value in page.attributes
    if name in ("src", "href", "srcset", "xlink:href") or name.startswith("on")
  ]
  style = text[text.index("<style>") : text.index("</style>")]
  assert "url(" not in style and "@import" not in style and "http" not in style
  assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
  assert ("content", "width=device-width,initial-scale=1") in page.attributes
  assert "prefers-color-scheme:dark" in style


def test_the_first_plot_shows_reward_and_searches(tmp_path):
  text = make_run(tmp_path, [row(step) for step in range(1, 30)])
  first = [text_of_svg.split("</svg>")[0] for text_of_svg in text.split("<svg")[1:3]]
  assert "Reward a training rollout" in first[0] and "Searches a question" in first[1]
  for title in (
    "Rollouts by number of searches",
    "Rollouts with zero advantage",
    "Policy entropy",
    "KL to the reference",
    "Gradient norm",
    "Mean |log-prob gap|",
    "Where a step",
  ):
    assert title in _Page(text).text


HOSTILE = (
  "</details><script>alert('x')</script><img src=x onerror=\"alert(1)\"> & \"q\" 'q' "
  "\u202eevil\u2066\0 é漢字 مرحبا"
)


def test_hostile_text_is_shown_and_never_becomes_markup(tmp_path):
  segments = [
    {"origin": origin, "text": f"<search>{HOSTILE}</search><answer>{HOSTILE}", "tokens": 3}
    for origin in ("prompt", "policy", "observation", HOSTILE)
  ]
  segments.append(
    {"origin": "observation", "text": f"Doc 1(Title: {HOSTILE}) x", "tokens": HOSTILE}
  )
  texts = ("question", "answer", "fault", "stop", "stratum", "hops", "searches")
  hostile = record(golden_answers=[HOSTILE, HOSTILE], segments=segments) | {
    key: HOSTILE for key in texts
  }
  folder = tmp_path / "<script>&run"
  config = {"policy": {"name": HOSTILE}, HOSTILE: HOSTILE}
  evaluation = {
    "sets": {HOSTILE: {"exact_match": 0.5, "by_hops": {HOSTILE: {"exact_match": 0.1}}}},
    "warm_start_forced": {HOSTILE: {HOSTILE: {"exact_match": 0.2}}},
  }
  text = make_run(folder, [row(1, not_finite={HOSTILE: HOSTILE})], [hostile], config, evaluation)
  page = _Page(text)  # balanced: nothing closed an element early
  assert not {"script", "img"} & set(page.tags)
  assert not [name for name, _ in page.attributes if name.startswith("on")]
  assert page.text.count("<script>alert('x')</script><img src=x onerror=\"alert(1)\">") > 10
  assert "é漢字 مرحبا" in page.text
  assert not [c for c in ("\u202e", "\u2066", "\0") if c in text.replace("U+", "")]
  assert "U+202E" in page.text


def test_a_rollout_is_readable(tmp_path):
  text = make_run(tmp_path, [row(7)], [record()])
  page = _Page(text)
  for part in (
    "Step 7 1 rollout, 0.0 % right",
    "1 of 1 rollouts in full",
    "Where was Ada born?",
    "reward 0",
    "advantage -0.71",
    "stratum 1",
    "calls: search 1",
    "1 hop",
    "answered Paris · correct: London",
    "from search · 2 passages: Ada (poet) · Ada II",
    "search “ada birth” · hit · 7, 9",
    "30 tokens",
  ):
    assert part in page.text
  assert (
    '<span class="tag search">&lt;search&gt;</span><span class="query">ada birth</span>' in text
  )
  assert (
    '<span class="tag answer">&lt;answer&gt;</span><span class="reply wrong">Paris</span>' in text
  )


def test_the_rollouts_shown_differ_in_stratum_and_success():
  records = [
    record(stratum=s, answer=ANSWERS[r], reward=float(r), sample=i)
    for i in range(5)
    for s in range(3)
    for r in (0, 1)
  ]
  chosen = transcripts.choose(records, 6)
  kinds = [(one["stratum"], one["reward"]) for one in chosen]
  assert kinds == [(0, 1), (0, 0), (1, 1), (1, 0), (2, 1), (2, 0)]
  assert {one["sample"] for one in chosen} == {0}
  assert len(transcripts.choose(records, 4)) == 4 and transcripts.choose([], 4) == []


def test_scores_come_before_and_after_by_hops_with_the_forced_ones(tmp_path):
  def score(base, searches):
    return {
      "count": 40,
      "exact_match": base,
      "f1": base,
      "searches_mean": searches,
      "by_hops": {
        str(hops): {"count": 10, "exact_match": base - 0.1 * hops, "searches_mean": hops}
        for hops in range(3)
      },
    }

  evaluation = {
    "sets": {"held_out": score(0.7, 1.9), "second_encyclopedia": score(0.65, 2.0)},
    "warm_start": {"sets": {"held_out": score(0.25, 1.0)}},
    "warm_start_forced": {
      "0": {"held_out": score(0.2, 0)},
      "2": {"sets": {"held_out": score(0.41, 2)}},
    },
  }
  page = _Page(make_run(tmp_path, [row(1)], config={"num_steps": 1}, evaluation=evaluation))
  for part in (
    "25.0 → 70.0",
    "+45.0 points",
    "41.0the policy before training forced to 2",
    "-5.0 points to the first",
    "of 1 in 4 s",
  ):
    assert part in page.text
  table = score_table.table(score_table.scores_of([], evaluation))
  rows = [[line["label"], *(cell["text"] for cell in line["cells"])] for line in table["rows"]]
  assert table["head"] == [
    "questions",
    "warm start",
    "trained",
    "gain",
    "forced to 0",
    "forced to 2",
    "F1",
    "searches",
    "number",
  ]
  assert rows[0] == [
    "Held out",
    "25.0",
    "70.0",
    "+45.0",
    "20.0",
    "41.0",
    "70.0",
    "1.00 → 1.90",
    "40",
  ]
  assert rows[2] == ["1 hop", "15.0", "60.0", "+45.0", "10.0", "31.0", "–", "1.00 → 1.00", "10"]
  assert rows[4] == ["Second encyclopedia", "–", "65.0", "–", "–", "–", "65.0", "2.00", "40"]


def test_without_evaluation_json_the_rows_tell_before_and_after():
  rows = [
    row(0, eval__exact_match=0.2, eval__exact_match_hops_1=0.1),
    row(5),
    row(9, eval__exact_match=0.6, eval__exact_match_hops_1=0.5),
  ]
  found = score_table.scores_of(rows, {})
  assert score_table.value(found.before["held_out"], hops="1") == 0.1
  assert score_table.value(found.after["held_out"]) == 0.6 and found.step == 9
  found = score_table.scores_of(rows[:2], {})
  assert score_table.value(found.before["held_out"]) == 0.2 and found.after == {}


def test_an_unfinished_run_shows_no_trained_score(tmp_path):
  rows = [row(0, eval__exact_match=0.2), row(1), row(2)]
  text = make_run(tmp_path / "a", rows, config={"num_steps": 9})
  page = _Page(text)
  assert "This run stands at step 2 of 9." in page.text and "trained" not in page.text
  assert "have not been evaluated yet since training began" in page.text
  assert "20.0before training" in page.text
  rows += [row(3, eval__exact_match=0.5)]
  page = _Page(make_run(tmp_path / "b", rows, config={"num_steps": 9}))
  assert "step 3" in page.text and "trained" not in page.text and "20.0 → 50.0" in page.text
  page = _Page(make_run(tmp_path / "c", rows, config={"num_steps": 3}))
  assert "trained" in page.text and "stands at" not in page.text


@pytest.mark.parametrize(
  "evaluation",
  [
    {},
    {"sets": None},
    {"sets": {"held_out": None}},
    {"sets": {"held_out": {"exact_match": None}}},
    {"held_out": {}},
    {
      "sets": {"held_out": {"exact_match": 0.5, "by_hops": [1]}},
      "warm_start": 3,
      "warm_start_forced": [1],
    },
  ],
)
def test_an_odd_evaluation_is_no_error(tmp_path, evaluation):
  _Page(make_run(tmp_path, [row(1)], evaluation=evaluation))


def test_an_empty_workdir_gives_a_page_that_says_what_is_missing(tmp_path):
  page = _Page(run_page.write(tmp_path).read_text())
  for part in (
    "config.json is missing",
    "no training step yet",
    "No trajectories",
    "not been evaluated yet",
  ):
    assert part in page.text
  with pytest.raises(FileNotFoundError, match="no workdir"):
    run_page.write(tmp_path / "nowhere")


def test_broken_files_are_named(tmp_path):
  (tmp_path / "config.json").write_text("{")
  (tmp_path / "evaluation.json").write_text("[]")
  rows = '{"step": 1, "reward/mean": 1}\n{"step": "x"}\n{"reward/mean": 1}\n{"s'
  (tmp_path / "metrics.jsonl").write_text(rows)
  (tmp_path / "trajectories").mkdir()
  records = '{"segments": 3, "answer": 7}\n{"segments": [1, {}]}\nxx'
  (tmp_path / "trajectories/step_000001.jsonl").write_text(records)
  page = _Page(run_page.write(tmp_path).read_text())
  for part in (
    "config.json is no JSON object",
    "evaluation.json is no JSON object",
    "metrics.jsonl that could not be read: 1",
    "does not record advantage/zero_share",
  ):
    assert part in page.text


def test_one_step_and_only_a_warm_start_are_drawn(tmp_path):
  assert "No alarm in 1 step." in _Page(make_run(tmp_path / "one", [row(1)])).text
  warm = [{"warm_start/step": i, "warm_start/loss": 1 / i} for i in range(1, 5)]
  with metrics.Writer(tmp_path / "warm") as writer:
    for one in warm:
      writer.write(one)
  text = run_page.write(tmp_path / "warm").read_text()
  assert "Warm start: loss by its own step" in _Page(text).text


def test_thousands_of_steps_make_a_page_of_bounded_size(tmp_path):
  rows = [row(step) for step in range(1, 4001)]
  rows[2000]["grad/norm"] = 900.0
  with (tmp_path / "metrics.jsonl").open("w") as file:
    file.writelines(json.dumps(one) + "\n" for one in rows)
  text = run_page.write(tmp_path).read_text()
  assert len(text) < 600_000
  gradient = text[text.index("Gradient norm") :]
  assert "1000</text>" in gradient[: gradient.index("</svg>")], "the spike is gone from the axis"


def test_thinning_keeps_spikes_order_and_ends():
  x = list(range(10_000))
  y = [0.0] * 10_000
  y[4321], y[7] = 5.0, None
  thin_x, thin_y = axes.thin(x, y)
  assert len(thin_x) <= 300 and thin_x == sorted(thin_x) and thin_x[0] == 0 and thin_x[-1] == 9999
  assert (4321, 5.0) in list(zip(thin_x, thin_y))
  assert axes.thin([1, 2], [None, 3.0]) == ([1, 2], [None, 3.0])


def test_smoothing_is_a_centred_mean_that_leaves_gaps_out():
  assert axes.smooth([1.0, 3.0, None, 7.0, 9.0], 3) == [2.0, 2.0, None, 8.0, 8.0]
  assert axes.smooth([4.0, 8.0], 1) == [4.0, 8.0]


@pytest.mark.parametrize(
  "low, high, wanted",
  [
    (0, 1, [0, 0.5, 1]),
    (0, 0.34, [0, 0.1, 0.2, 0.3]),
    (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    (0, 4321, [0, 2000, 4000]),
    (2, 2, [2]),
  ],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, wanted):
  assert axes.ticks(low, high) == pytest.approx(wanted)


@pytest.mark.parametrize(
  "value, percent, text",
  [
    (None, False, "–"),
    (0.0, False, "0"),
    (0.1234, False, "0.123"),
    (12.0, False, "12"),
    (1234.5, False, "1234"),
    (45_678, False, "46k"),
    (1_048_576, False, "1.05M"),
    (3.09e9, False, "3.09B"),
    (5e9 * 1e9, False, "5.0e+18"),
    (2e-6, False, "2e-6"),
    (3.14e-5, False, "3.1e-5"),
    (0.3, True, "30%"),
    (0.1234, True, "12.3%"),
  ],
)
def test_numbers_are_short(value, percent, text):
  assert texts.number(value, percent) == text


def test_a_chart_of_its_own_is_a_whole_svg_file(tmp_path):
  make_run(tmp_path, [row(step) for step in range(1, 30)])
  root = xml.etree.ElementTree.fromstring(run_page.picture(tmp_path))
  assert root.tag == "{http://www.w3.org/2000/svg}svg" and float(root.get("width")) <= 1000
  assert "prefers-color-scheme:dark" in root.find("{http://www.w3.org/2000/svg}style").text


def test_odd_series_are_drawn_without_error():
  series = [
    plots.Series("none", [1, 2], [None, None]),
    plots.Series("flat", [1, 2], [0.0, 0.0]),
    plots.Series("one", [3], [2.0]),
    plots.Series("empty", [], []),
    plots.Series("negative", [1, 2], [-5.0, -1.0]),
    plots.Series("tiny", [1, 2], [1e-9, 2e-9]),
    plots.Series("<b>&", [1, 2, 3], [1.0, None, 2.0], style="noisy"),
  ]
  for one in series:
    for stacked in (False, True):
      panel = plots.Panel("<t>&", (one,), stacked=stacked)
      xml.etree.ElementTree.fromstring(plots.figure([panel], standalone=True))


def test_stacked_shares_fill_the_plot_and_many_strata_are_gathered():
  rows = [row(step, **{f"strata__share_{k}": 1 / 12 for k in range(12)}) for step in range(1, 40)]
  panel = run_figures.strata_panel(timelines.make(rows), by_searches=False)
  assert len(panel.series) == 7 and panel.series[-1].name == "other"
  assert [pytest.approx(1.0)] * 39 == [
    sum(values) for values in zip(*(series.y for series in panel.series))
  ]


def test_time_that_no_part_claims_is_drawn(tmp_path):
  drawn, _, _ = run_figures.cards(timelines.make([row(step) for step in range(1, 5)]))
  panel = next(panel for panel in drawn["Speed"] if "time" in panel.title)
  shares = {series.name: series.y[0] for series in panel.series}
  assert shares == {"rollout": 0.5, "update": 0.25, "everything else": 0.25}


QUIET = [row(step) for step in range(1, 101)]


def test_a_steady_run_raises_no_alarm():
  assert alarms.find(QUIET) == [] and alarms.find([]) == [] and alarms.find(QUIET[:1]) == []


@pytest.mark.parametrize(
  "key, after, first, words",
  [
    ("policy/entropy", 0.02, 66, "stopped exploring"),
    ("policy/entropy", 2.0, 66, "dissolves into noise"),
    ("policy/logp_gap_mean", 0.036, 65, "drifts off-policy"),
    ("rollout/searches_mean", 0.05, 66, "skip the tool"),
    ("reward/mean", 0.05, 66, "reward fell"),
    ("loss/kl", 3.0, 65, "KL to the reference reached 1.5"),
    ("advantage/zero_share", 0.99, 66, "99% of the advantages are zero"),
    ("strata/share_1", 0.99, 66, "99% of the rollouts lie in stratum 1"),
    ("grad/norm", 40.0, 61, "40 times the usual 1"),
    ("update/skipped", 1, 61, "not finite: 40"),
    ("rollout/failed", 9, 61, "lost to faults: 9"),
    ("not_finite", {"loss/policy": "nan"}, 61, "not finite: loss/policy (nan)"),
  ],
)
def test_each_collapse_is_named_with_its_step(key, after, first, words):
  rows = QUIET[:60] + [one | {key: after} for one in QUIET[60:]]
  found = alarms.find(rows)
  assert [alarm.step for alarm in found] == [first] and words in found[0].message


def test_one_odd_step_is_no_collapse_and_a_few_lost_rollouts_pass():
  odd = {
    "policy/entropy": 0.0,
    "rollout/searches_mean": 0.0,
    "reward/mean": 0.0,
    "policy/logp_gap_mean": 1.0,
  }
  rows = QUIET[:60] + [QUIET[60] | odd | {"rollout/failed": 3}] + QUIET[61:]
  assert alarms.find(rows, rollouts_per_step=128) == []
  assert [alarm.key for alarm in alarms.find(rows)] == ["rollout/failed"]


def test_alarms_are_on_the_page_and_marked_on_the_plot(tmp_path):
  text = make_run(
    tmp_path, QUIET[:60] + [one | {"rollout/searches_mean": 0.0} for one in QUIET[60:]]
  )
  assert "Step 66: searches fell to 0.00 a question from 1.50" in _Page(text).text
  marked = [one.split("</svg>")[0] for one in text.split("<svg")[1:] if 'class="alarm"' in one]
  assert ["Searches a question" in one for one in marked] == [True]


def test_the_command_writes_page_or_picture_and_names_a_missing_workdir(tmp_path):
  make_run(tmp_path / "run", [row(1), row(2)])
  run = lambda *flags: programs.run("experiments/report.py", *flags)
  (tmp_path / "run/report.html").unlink()
  done = run(f"--workdir={tmp_path}/run")
  assert done.stdout.strip() == f"{tmp_path}/run/report.html", done.stderr
  assert (tmp_path / "run/report.html").exists()
  assert run(f"--workdir={tmp_path}/run", f"--picture={tmp_path}/run.svg").returncode == 0
  xml.etree.ElementTree.parse(tmp_path / "run.svg")
  for flags, said in (
    ([f"--workdir={tmp_path}/no"], "there is no workdir"),
    ([f"--workdir={tmp_path}/run", "--steps=7"], "has no rollouts of step 7; it has none"),
    ([f"--workdir={tmp_path}/run", "--steps=x"], "--steps=x must be numbers, such as --steps=1,40"),
  ):
    failed = run(*flags)
    assert failed.returncode and said in failed.stderr and "Traceback" not in failed.stderr


@pytest.mark.parametrize(
  "low, high", [(0.0, 1e-16), (-3e-300, 3e-300), (0.0, 1e300), (1.0, 1.0 + 1e-12)]
)
def test_ticks_are_distinct_whatever_the_range(low, high):
  found = axes.ticks(low, high)
  assert len(set(found)) == len(found) >= 2


# --- What a run may leave that nobody expects ---


def test_huge_answers_make_a_small_page(tmp_path):
  huge = "\0\u202e<&>" * 200_000
  segments = [{"origin": origin, "text": huge, "tokens": 9} for origin in ("policy", "observation")]
  calls = [{"tool": huge, "argument": huge, "outcome": huge, "results": [huge] * 50}] * 50
  hostile = record(
    question=huge,
    answer=huge,
    golden_answers=[huge] * 50,
    segments=segments * 40,
    turns=[{"action": "call", "calls": calls}] * 40,
    calls={huge: 1},
    fault=huge,
    stop=huge,
  )
  records = [hostile | {"sample": k, "stratum": k % 4, "reward": k % 2} for k in range(8)]
  (tmp_path / "trajectories").mkdir()
  with (tmp_path / "trajectories/step_000001.jsonl").open("w") as file:
    file.write(json.dumps(record(question=huge, answer=huge, segments=segments)) + "\n")
  assert len(run_page.write(tmp_path).read_text()) < 400_000
  shown = text_of_rollouts(records)
  assert len(shown) < 3_500_000 and "more characters" in shown


def text_of_rollouts(records):
  """The part of a page that shows these records."""
  run = run_page.Run(pathlib.Path("x"))
  step = {
    "step": 1,
    "count": len(records),
    "right": 0.0,
    "rollouts": [transcripts.view(one) for one in records],
    "groups": [group_view.view(records)],
  }
  values = {"steps": [step]}
  rendered = {}
  original = texts.render
  texts.render = lambda name, given: rendered.setdefault("page", original(name, given | values))
  try:
    run_page.page(run)
  finally:
    texts.render = original
  return rendered["page"]


DIGITS = "9" * 400
ODD_ROWS = [
  '{"step": 1, "reward/mean": NaN, "grad/norm": Infinity, "loss/kl": 1e400, "time/step_s": NaN}',
  '{"step": 2, "reward/mean": 0.5, "grad/norm": ' + DIGITS + ', "strata/share_1": -Infinity}',
  '{"step": 3, "reward/mean": true, "eval/exact_match": NaN, "rollout/searches_mean": [1]}',
  '{"step": ' + DIGITS + ', "reward/mean": 0.5}',
  '{"step": 4, "reward/mean": ' + "9" * 5000 + "}",
  '{"step": 5, "reward/mean": ' + "[" * 100_000 + "]" * 100_000 + "}",
  '{"step": 6, "reward/mean": 0.25, "eval/exact_match": 0.5, "time/step_s": 1e300}',
]


def test_odd_numbers_and_deep_json_are_no_error(tmp_path):
  (tmp_path / "metrics.jsonl").write_text("\n".join(ODD_ROWS) + "\n")
  (tmp_path / "config.json").write_text('{"a": ' + '{"b": ' * 990 + "1" + "}" * 990 + "}")
  (tmp_path / "evaluation.json").write_text(
    '{"sets": {"held_out": {"exact_match": NaN}}, "step": NaN}'
  )
  (tmp_path / "trajectories").mkdir()
  odd = '{"question": "q", "reward": %s, "advantage": NaN, "stratum": %s, "hops": Infinity, '
  odd += '"calls": {"a": NaN}}'
  deep = (
    '{"question": "q", "turns": '
    + "[" * 900
    + "]" * 900
    + ', "answer": '
    + "[" * 900
    + "]" * 900
    + "}"
  )
  lines = [
    odd % (DIGITS, DIGITS),
    odd % ("Infinity", "{}"),
    deep,
    '{"turns": [{"calls": [1, {}]}]}',
  ]
  (tmp_path / "trajectories/step_000001.jsonl").write_text("\n".join(lines))
  page = _Page(run_page.write(tmp_path).read_text())
  assert "metrics.jsonl that could not be read: 2" in page.text
  assert "nan" not in page.text and "9" * 200 not in page.text
  xml.etree.ElementTree.fromstring(run_page.picture(tmp_path))


def test_invisible_characters_in_a_row_are_counted():
  assert texts.visible("a\0\0\0b") == 'a<span class="code">U+0000 × 3</span>b'
  assert texts.visible("\u202e<") == '<span class="code">U+202E</span>&lt;'
  assert texts.one_line("a\u202eb\n") == "a[U+202E]b\n"


def test_a_template_that_forgets_every_filter_still_lets_nothing_through():
  made = texts.environment().from_string("{{ a }}{% if b %}{{ b.c }}{% endif %}")
  assert (
    made.render(a="<b>\u202e", b={"c": "&"}) == '&lt;b&gt;<span class="code">U+202E</span>&amp;'
  )


def test_no_page_shows_a_password(tmp_path):
  config = {
    "retriever": {"url": "http://me:secret@host:80/x"},
    "policy": {"checkpoint": "a://u:secret@b"},
  }
  text = make_run(tmp_path, [row(1)], config=config)
  assert "secret" not in text and "http://…@host:80/x" in text


def test_the_fields_at_the_top_exist_in_every_preset():
  for name in ("tiny", "smollm2", "base", "instruct"):
    known = files.flatten(search_r1.get_config(name).to_dict())
    assert set(run_page.SUMMARY) <= known.keys()
  for name in run_page.COUNTS_SEARCHES:
    strata.make(name)


# --- Tools, groups, stages ---


def test_every_call_names_its_tool(tmp_path):
  calls = [
    {"tool": "search", "argument": "ada birth", "outcome": "hit", "results": ["7"]},
    {"tool": "calculator", "argument": "2 * 21", "outcome": "error", "results": []},
  ]
  new = record(turns=[{"action": "call", "calls": calls}, {"action": "answer", "calls": []}])
  new |= {"calls": {"search": 1, "calculator": 1}}
  page = _Page(make_run(tmp_path, [row(7)], [new]))
  for part in (
    "calls: search 1, calculator 1",
    "search “ada birth” · hit · 7",
    "calculator “2 * 21” · error",
    "from search, calculator · 2 passages",
  ):
    assert part in page.text
  assert transcripts.calls_by_tool(record()) == {"search": 1}


def test_a_right_answer_is_marked_unlike_a_wrong_one(tmp_path):
  wrong, right = [
    make_run(tmp_path / golden, [row(1)], [record(golden_answers=[golden], reward=0.2)])
    for golden in ("London", "Paris")  # what it earned for its form does not make it right
  ]
  for page, told, other, chip in (
    (wrong, "wrong", "right", "bad"),
    (right, "right", "wrong", "good"),
  ):
    assert f'reply {told}">Paris' in page and f'reply {other}"' not in page
    assert f'<b class="text {told}">Paris' in page
    assert f'<span class="chip {chip}">{told}</span>' in page
  unknown = make_run(tmp_path / "unknown", [row(1)], [record(golden_answers=[])])
  assert 'reply ">Paris' in unknown and "chip bad" not in unknown and "chip good" not in unknown


def group(rewards, strata_, question="Who?"):
  return [
    record(question=question, sample=k, answer=ANSWERS[r], reward=r, stratum=s, advantage=r - 0.5)
    for k, (r, s) in enumerate(zip(rewards, strata_))
  ]


def test_a_group_stands_by_stratum_with_reward_and_advantage(tmp_path):
  records = group([1.0, 0.0, 0.0, 1.0], [2, 0, 2, 0])
  view = group_view.view(records)
  assert [(one["name"], one["mean"]) for one in view["strata"]] == [("0", "0.50"), ("2", "0.50")]
  assert [roll["sample"] for roll in view["strata"][0]["rollouts"]] == ["1", "3"]
  assert [roll["bar"] for roll in view["strata"][0]["rollouts"]] == [-100.0, 100.0]
  assert view["strata"][0]["rollouts"][0]["advantage"] == "-0.50" and view["mean"] == "0.50"
  text = make_run(tmp_path, [row(3)], records)
  assert "Step 3 <span" in text and text.count('class="bar"') == 1 + 4


def write_steps(folder, steps):
  """Rollouts of several steps, of which the page chooses."""
  with metrics.Writer(folder) as writer:
    for step in steps:
      writer.write(row(step))
      writer.write_trajectories(step, [record(sample=k, stratum=k % 3) for k in range(40)])


def test_six_steps_are_shown_or_those_that_are_named_with_more_of_each(tmp_path):
  write_steps(tmp_path, range(1, 51))
  shown = lambda text: [int(step) for step in re.findall(r"<summary>Step (\d+) ", text)]
  text = run_page.write(tmp_path).read_text()
  assert shown(text) == [1, 11, 21, 30, 40, 50] and "6 of 50 steps that are recorded" in text
  assert text.count('<details class="step" open') == 1 and text.count('class="roll ') == 6 * 3
  assert shown(run_page.write(tmp_path, [33, 7, 33]).read_text()) == [7, 33]
  with pytest.raises(ValueError, match="no rollouts of step 99; it has 50 from 1 to 50"):
    run_page.write(tmp_path, [99])


def test_rollouts_are_filtered_by_stratum_answer_and_hops_without_a_script(tmp_path):
  records = [record(stratum=s, hops=h, sample=s) for s in (0, 10, 2) for h in (1, 2)]
  records += [record(stratum=0, hops=1, answer="London"), record(fault="gone", stratum=None)]
  found = filters.make(records)
  assert {name: list(values) for name, values in found.facets.items()} == {
    "stratum": ["0", "2", "10", "–"],
    "answer": ["lost", "right", "wrong"],
    "hops": ["1", "2"],
  }
  assert found.classes(records[1]) == "stratum-0 answer-2 hops-1"
  text = make_run(tmp_path, [row(1)], records)
  assert text.count('type="radio"') == 4 + 1 + 3 + 1 + 2 + 1 and "<script" not in text
  assert "main:has(#hops-1:checked) .roll:not(.hops-1)" in text
  assert 'class="roll pick stratum-0 answer-1 hops-0"' in text
  one = filters.make([record(), record(stratum='"><script>')])
  assert one.ids == ["stratum-0", "stratum-1"], "a facet of one value needs no button"


def test_the_page_says_when_by_which_command_and_how_large(tmp_path):
  claim.record_start(
    tmp_path,
    ["experiments/train.py", "--config.retriever.url=http://me:secret@host:1"],
    parameters=1_048_576,
    devices="2 x cpu",
  )
  claim.record_start(tmp_path, ["another"], parameters=1)  # a resumed run began before
  text = _Page(make_run(tmp_path, [row(1)])).text
  assert re.search(r"began 20\d\d-\d\d-\d\d \d\d:\d\d UTC", text) and "last written 20" in text
  assert "policy 1.05M parameters" in text and "on 2 x cpu" in text
  assert "--config.retriever.url=http://***@host:1" in (tmp_path / "run.json").read_text()
  assert "secret" not in text and "command python experiments/train.py" in text


def test_tiny_values_have_a_unit_in_the_title_and_plain_numbers_on_the_axis():
  series = plots.Series("gap", [1, 2, 3], [0.0, 4e-10, 5e-10], low=[None] * 3, high=[None] * 3)
  drawn = plots.figure([plots.Panel("Gap", (series,))])
  assert "Gap, × 10⁻¹²" in drawn and ">500<" in drawn and "e-1" not in drawn
  whole = plots.figure([plots.Panel("Gap", (dataclasses.replace(series, y=[0.0, 0.5, 4e-10]),))])
  assert "Gap</text>" in whole


def test_the_groups_shown_have_successes_and_failures_in_several_strata():
  dull = group([0.0] * 4, [0, 1, 2, 3], "dull")
  mixed = group([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], "mixed")
  found = group_view.groups([*dull, *mixed, record(question="alone")])
  assert [len(one) for one in found] == [4, 4, 1]
  assert [one[0]["question"] for one in group_view.choose(found, 1)] == ["mixed"]
  assert [one[0]["question"] for one in group_view.choose(found, 5)] == ["dull", "mixed"]


def test_a_lost_rollout_stands_apart_in_its_group():
  records = group([1.0, 0.0], [1, 1]) + [
    record(fault="gone", reward=None, stratum=None, advantage=None, sample=2)
  ]
  names = {one["name"]: one["mean"] for one in group_view.view(records)["strata"]}
  assert names == {"1": "0.50", "lost": "–"}


def test_stages_stand_on_one_axis_in_order_and_are_named(tmp_path):
  rows = [
    {"warm_start/step": i, "warm_start/loss": 1 / i, "stage": "warm_start"} for i in range(1, 41)
  ]
  rows += [row(step, stage="reinforcement", cycle=1) for step in range(0, 30)]
  rows += [
    {"step": step, "stage": "distillation", "cycle": 1, "distillation/loss": 1.0}
    for step in range(30, 50)
  ]
  rows += [row(step, stage="reinforcement", cycle=2) for step in range(50, 60)]
  line = timelines.make(rows)
  assert tuple((stage.name, stage.begin) for stage in line.stages) == (
    ("warm start", 1),
    ("reinforcement 1", 40),
    ("distillation 1", 70),
    ("reinforcement 2", 90),
  )
  assert [one["x"] for one in line.rows] == [*range(1, 41), *range(40, 100)]
  with (tmp_path / "metrics.jsonl").open("w") as file:
    file.writelines(json.dumps(one) + "\n" for one in rows)
  text = run_page.write(tmp_path).read_text()
  first = text[text.index("<svg") : text.index("</svg>")]
  assert "step of the run, stage by stage" in first and "reinforcement 1" in first
  assert "Distillation loss" in text and 'class="stage"' in first


def cycles():
  """Rows of two cycles: 10 steps of reinforcement and 5 of distillation each, and evaluations."""
  rows = [{"warm_start/step": i, "warm_start/loss": 1.0, "stage": "warm_start"} for i in (50, 100)]
  scored = lambda step, searches: {
    "step": step,
    "eval/exact_match": 0.5,
    "eval/searches_mean": searches,
    "eval/searches_hops_1": searches,
    "eval/searches_hops_2": 2 * searches,
  }
  rows.append(scored(0, 0.5))
  for step in range(1, 31):
    cycle, within = 1 + (step - 1) // 15, (step - 1) % 15
    phase = "reinforcement" if within < 10 else "distillation"
    named = {"stage": f"{phase}_{cycle}", "phase": phase, "cycle": cycle}
    if phase == "reinforcement":
      rows.append(row(step) | named)
    else:
      rows.append({"step": step, "distillation/loss": -0.1, "distillation/kl": 0.3} | named)
      rows[-1] |= {"grad/norm": 0.1, "distillation/clipped_share": 0.5, "pairs/count": 9 * cycle}
    if within == 10:
      rows[-1] |= {"pairs/skipped_all_wrong": 0.25, "pairs/skipped_all_wrong_hops_2": 0.75}
      rows[-1] |= {"pairs/all_right": 0.125, "pairs/count_hops_2": 4}
    if within in (9, 14):
      rows.append(scored(step, step / 10))
  return rows


def test_phases_of_cycles_are_bands_of_one_axis_behind_every_curve():
  line = timelines.make(cycles())
  assert [(one.name, one.begin, one.last, one.shade) for one in line.stages] == [
    ("warm start", 50, 100, None),
    ("reinforcement 1", 100, 109, 0),
    ("distillation 1", 110, 114, 1),
    ("reinforcement 2", 115, 124, 0),
    ("distillation 2", 125, 129, 1),
  ]
  drawn, _, _ = run_figures.cards(line)
  panels = [*run_figures.first_panels(line), *(panel for card in drawn.values() for panel in card)]
  assert {panel.x_limits for panel in panels} == {(100, 129)}
  for panel in panels:
    text = plots.figure([panel])
    assert text.count('class="phase p0"') == text.count('class="phase p1"') == 2, panel.title
    assert "<title>distillation 2</title>" in text


def test_a_metric_that_a_phase_lacks_leaves_a_gap_and_never_a_line_across():
  line = timelines.make(cycles())
  drawn, missing, _ = run_figures.cards(line)
  assert missing == []
  by_title = {panel.title: panel for card in drawn.values() for panel in card}
  entropy, strata_ = by_title["Policy entropy, nats a token"], drawn["Strata"][0]
  assert entropy.series[0].breaks == strata_.series[0].breaks == (10,)
  assert by_title["Gradient norm before clipping"].series[0].breaks == (10, 15, 25)
  lines = re.findall(r'<path class="line s0" d="([^"]*)"', plots.figure([entropy]))
  assert len(lines) == 2
  ends = [[float(x) for x in re.findall(r"[ML]([\d.]+) ", d)] for d in lines]
  assert min(ends[1]) - max(ends[0]) > 60, "six steps of eleven pixels lie between them"
  assert plots.figure([strata_]).count("<polygon") == 2 * len(strata_.series)
  [loss] = by_title["Distillation loss, nats a token"].series
  [kl] = by_title["True KL to the teacher, nats a token"].series
  assert loss.breaks == kl.breaks == (5,) and set(loss.y) == {-0.1}


def test_pairs_and_searches_stand_by_hops_and_cycle(tmp_path):
  rows = cycles()
  line = timelines.make(rows)
  drawn, _, _ = run_figures.cards(line)
  searches, pairs, wrong, right = drawn["Cycles"]
  assert [(one.name, one.x, one.y) for one in searches.series] == [
    ("1 hop", [100, 109, 114, 124, 129], [0.5, 1.0, 1.5, 2.5, 3.0]),
    ("2 hops", [100, 109, 114, 124, 129], [1.0, 2.0, 3.0, 5.0, 6.0]),
  ]
  of = lambda panel: {one.name: (one.x, one.y) for one in panel.series}
  assert of(pairs) == {"all": ([110, 125], [9, 18]), "2 hops": ([110, 125], [4, 4])}
  assert of(wrong) == {"all": ([110, 125], [0.25] * 2), "2 hops": ([110, 125], [0.75] * 2)}
  assert of(right) == {"all": ([110, 125], [0.125] * 2)}
  assert cycle_figures.phase_table(line) == {
    "head": ["phase", "all", "1 hop", "2 hops"],
    "rows": [
      ("reinforcement 1", ["0.50 → 1.00", "0.50 → 1.00", "1.00 → 2.00"]),
      ("distillation 1", ["1.00 → 1.50", "1.00 → 1.50", "2.00 → 3.00"]),
      ("reinforcement 2", ["1.50 → 2.50", "1.50 → 2.50", "3.00 → 5.00"]),
      ("distillation 2", ["2.50 → 3.00", "2.50 → 3.00", "5.00 → 6.00"]),
    ],
  }
  page = _Page(make_run(tmp_path / "whole", rows, config={"num_steps": 30}))
  assert "stands at step" not in page.text and "No alarm in 30 steps" in page.text
  for part in (
    "Phases: reinforcement (r)distillation (d)",
    "before → after each phase",
    "2.00 → 3.00",
  ):
    assert part in page.text
  page = _Page(make_run(tmp_path / "begun", rows[:9]))  # killed in the first phase
  assert "0.50 → –" in page.text


def test_stages_without_cycles_have_lines_and_names_and_no_bands(tmp_path):
  rows = [{"warm_start/step": 9, "warm_start/loss": 1.0, "stage": "warm_start"}]
  rows += [row(0, eval__exact_match=0.5), *(row(i, stage="reinforcement") for i in range(1, 9))]
  line = timelines.make(rows)
  assert not line.cycles and [one.shade for one in line.stages] == [None, None]
  text = make_run(tmp_path, rows)
  assert 'class="stage"' in text and 'class="phase' not in text and "Phases:" not in text
  assert cycle_figures.phase_table(line) is None and "Cycles" not in run_figures.cards(line)[0]
  [evaluated] = run_figures.first_panels(line)[1].series
  assert (evaluated.name, evaluated.x) == ("held out", [9]), "at the warm start's end"


def test_a_run_without_stages_is_drawn_by_its_steps():
  line = timelines.make([{"warm_start/step": 9, "warm_start/loss": 1.0}, row(0), row(1)])
  assert line.stages == () and line.x_label == "step" and [one["x"] for one in line.train] == [0, 1]


def test_marks_at_one_place_have_unlike_shapes_and_sizes():
  series = [plots.Series(name, [1, 2], [0.5, 0.5], i, "dots") for i, name in enumerate("ab")]
  drawn = plots.figure([plots.Panel("t", tuple(series))])
  marks = set(re.findall(r'<path class="dot f\d" d="([^"]*)" transform="[^"]*(scale[^"]*)"', drawn))
  assert len(marks) == 2 and len({size for _, size in marks}) == 2


@pytest.mark.parametrize(
  "value, digits, signed, text",
  [
    (-0.0001, 1, False, "0.0"),
    (-0.04, 1, True, "0.0"),
    (0.25, 2, True, "+0.25"),
    (None, 1, False, "–"),
  ],
)
def test_there_is_no_negative_zero(value, digits, signed, text):
  assert texts.fixed(value, digits, signed) == text
  assert texts.number(-0.00001, True) == "0%"


def test_curves_of_nothing_but_zeros_have_an_axis_to_one():
  drawn = plots.figure([plots.Panel("t", (plots.Series("a", [1, 2, 3], [0.0, 0.0, 0.0]),))])
  labels = re.findall(r'<text class="e" [^>]*>([^<]*)<', drawn)
  assert labels == ["0", "0.5", "1"]
