"""Comparisons: how runs are found and grouped, their means and intervals; no missing piece breaks a
page."""

import functools
import json
import math
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import programs
import pytest
import scipy.stats
from test_report import _Page

from stratified.reports import comparison, comparison_page, plots
from stratified.runs import workdir as workdirs

ROOT = pathlib.Path(__file__).parents[1]
HOSTILE = "</style><script>alert('x')</script> & \"q\""


def run(
  folder,
  *,
  steps=20,
  planned=20,
  seed=0,
  reward=0.5,
  score=0.6,
  start=0.3,
  evaluated=True,
  **changed,
):
  """A workdir as experiments/train.py leaves it, written by hand."""
  folder.mkdir(parents=True)
  config = {
    "seed": seed,
    "num_steps": planned,
    "advantage": {"name": "gn", "alpha": 0.6},
    "checkpoint": {"every": 10},
  }
  for key, value in changed.items():
    part, _, name = key.partition("__")
    (config.setdefault(part, {}) if name else config)[name or part] = value
  (folder / "config.json").write_text(json.dumps(config))
  rows = [
    {"warm_start/step": 1, "warm_start/loss": 2.0},
    {"step": 0, "eval/exact_match": start, "eval/searches_mean": 1.0},
  ]
  rows += [
    {
      "step": step,
      "reward/mean": reward,
      "rollout/searches_mean": 1 + step / 20,
      "advantage/zero_share": 0.25,
      "advantage/rms": 0.8,
      "grad/norm": None if step == 3 else 1.0,
    }
    for step in range(1, steps + 1)
  ]
  if evaluated:
    rows.append(
      {
        "step": steps,
        "eval/exact_match": score,
        "eval/exact_match_hops_1": score,
        "eval/searches_mean": 2.0,
        "eval/second_encyclopedia/exact_match": score - 0.05,
      }
    )
    sets = {
      "held_out": {
        "exact_match": score,
        "count": 400,
        "by_hops": {"1": {"exact_match": score, "count": 120}},
      }
    }
    (folder / "evaluation.json").write_text(json.dumps({"step": steps, "sets": sets}))
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return folder


@pytest.fixture
def paper(tmp_path):
  """Three settings, three seeds each, as a sweep leaves them; SAN gains 10 points on GRPO in every
  seed."""
  for name, gain in (("gn", 0.0), ("san", 0.1), ("blend", 0.15)):
    for seed in range(3):
      run(
        tmp_path / f"{name}-{seed}",
        seed=seed,
        score=0.4 + 0.1 * seed + gain,
        reward=0.4 + gain,
        advantage__name=name,
      )
  return tmp_path


# --- Finding and grouping ---


def test_a_folder_a_glob_and_a_label_find_the_same_runs(paper):
  for arguments in ([str(paper)], [f"{paper}/*"], [f"{paper}/gn-*", f"{paper}/*"]):
    found, notes = workdirs.find(arguments)
    assert len(found) == 9 and not notes
  found, _ = workdirs.find([f"SAN only={paper}/san-*"])
  assert [(label, path.name) for label, path in found] == [
    ("SAN only", f"san-{i}") for i in range(3)
  ]


def test_a_path_that_holds_an_equals_sign_is_a_path(tmp_path):
  run(tmp_path / "alpha=0.2")
  assert workdirs.find([str(tmp_path / "alpha=0.2")])[0] == [(None, tmp_path / "alpha=0.2")]


def test_names_come_in_the_order_of_their_numbers(tmp_path):
  for name in ("alpha-1", "alpha-0.2", "alpha-0.15", "alpha-10"):
    run(tmp_path / name)
  found, _ = workdirs.find([str(tmp_path)])
  assert [path.name for _, path in found] == ["alpha-0.15", "alpha-0.2", "alpha-1", "alpha-10"]


def test_runs_are_grouped_by_what_differs_but_not_by_the_seed(paper):
  made = comparison.of([str(paper)])
  assert {label: len(runs) for label, runs in made.groups.items()} == {
    "advantage blend": 3,
    "advantage gn": 3,
    "advantage san": 3,
  }
  assert made.reference == "advantage blend"
  assert "The groups differ in advantage.name." in made.notes


def test_what_changes_no_result_makes_no_group(tmp_path):
  run(tmp_path / "a", checkpoint__every=10, mesh__data=1, seed=0)
  run(tmp_path / "b", checkpoint__every=99, mesh__data=8, seed=1)
  assert list(comparison.of([str(tmp_path)]).groups) == ["all runs"]


def test_a_label_that_mixes_settings_is_pointed_out(paper):
  made = comparison.of(
    [f"ours={paper}/san-*", f"ours={paper}/blend-*", f"GRPO={paper}/gn-*"], "GRPO"
  )
  assert "ours mixes runs that differ in advantage.name." in made.notes
  assert (
    "ours holds several runs of one seed; its interval takes them for independent." in made.notes
  )


def test_keys_of_one_last_name_keep_enough_of_the_rest():
  assert workdirs.short_keys(["lora.alpha", "advantage.alpha", "strata.name"]) == {
    "lora.alpha": "lora.alpha",
    "advantage.alpha": "advantage.alpha",
    "strata.name": "strata",
  }


@pytest.mark.parametrize(
  "arguments, reference, sentence",
  [
    ([], None, r"there is no run in no argument; name workdirs"),
    (["/nowhere/*"], None, r"there is no run in '/nowhere/\*'"),
    (
      ["HERE"],
      "GRPO",
      r"--reference='GRPO' is no group; choose one of 'advantage blend', 'advantage gn'",
    ),
  ],
)
def test_what_cannot_be_compared_is_refused_in_words(arguments, reference, sentence, paper):
  with pytest.raises(ValueError, match=sentence):
    comparison.of([str(paper) if one == "HERE" else one for one in arguments], reference)


# --- Numbers ---


def test_an_interval_is_students():
  values = [0.41, 0.47, 0.52, 0.43]
  low, high = scipy.stats.t.interval(0.95, 3, scipy.stats.tmean(values), scipy.stats.sem(values))
  found = comparison.estimate(values)
  assert (
    (found.low, found.high) == pytest.approx((low, high))
    and found.count == 4
    and found.over == "seeds"
  )


def test_a_lone_run_has_wilsons_interval_over_its_questions_and_none_for_the_rest(tmp_path):
  run(tmp_path / "one", score=0.6)
  end = comparison.summary([workdirs.read(tmp_path / "one")])
  # Wilson's interval for 240 of 400 and 72 of 120, as scipy.stats.binomtest(k,
  # n).proportion_ci(method="wilson").
  for key, count in (("eval/exact_match", 400), ("eval/exact_match_hops_1", 120)):
    wanted = scipy.stats.binomtest(round(0.6 * count), count).proportion_ci(method="wilson")
    assert (end[key].low, end[key].high) == pytest.approx((wanted.low, wanted.high), abs=1e-6)
    assert end[key].over == "questions"
  assert (
    end["eval/searches_mean"].low is None
    and end["eval/second_encyclopedia/exact_match"].low is None
  )


def test_the_interval_over_questions_is_not_that_of_another_step(tmp_path):
  folder = run(tmp_path / "one")
  sets = {"held_out": {"exact_match": 0.6, "count": 400}}
  (folder / "evaluation.json").write_text(json.dumps({"step": 10, "sets": sets}))
  assert comparison.summary([workdirs.read(folder)])["eval/exact_match"].low is None


def test_differences_are_paired_by_seed(paper):
  made = comparison.of([str(paper)], "advantage gn")
  found = comparison.difference(made.groups["advantage san"], made.groups["advantage gn"])
  # The seeds lie 10 points apart, the gain is 10 in each: paired, nothing is left of the spread
  # between seeds.
  assert found.over == "pairs" and found.count == 3
  assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))


def test_without_a_shared_seed_the_interval_is_welchs(tmp_path):
  ours, theirs = [0.61, 0.66, 0.58], [0.5, 0.57]
  for i, score in enumerate(ours + theirs):
    run(tmp_path / f"{i}", seed=i, score=score)
  read = [workdirs.read(tmp_path / f"{i}") for i in range(5)]
  found = comparison.difference(read[:3], read[3:])
  wanted = scipy.stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
  assert found.over == "groups" and (found.low, found.high) == pytest.approx(
    (wanted.low, wanted.high)
  )


def test_end_values_are_of_the_last_step_and_of_the_last_ten(tmp_path):
  end = comparison.end_values(workdirs.read(run(tmp_path / "one", score=0.6, start=0.3)))
  assert end["eval/exact_match"] == 0.6 and end["start/exact_match"] == 0.3
  assert end["train/searches"] == pytest.approx(sum(1 + step / 20 for step in range(11, 21)) / 10)
  assert end["train/zero_share"] == 0.25 and end["train/rms"] == pytest.approx(0.8)


def test_a_curve_is_the_mean_over_runs_with_one_deviation_to_either_side(tmp_path):
  for seed, reward in enumerate((0.2, 0.4, 0.6)):
    run(tmp_path / f"{seed}", seed=seed, reward=reward, steps=20 if seed else 5)
  curve = comparison.curve([workdirs.read(tmp_path / f"{i}") for i in range(3)], "reward/mean")
  assert curve.x == list(range(1, 21))
  assert (curve.mean[0], curve.low[0], curve.high[0]) == pytest.approx((0.4, 0.2, 0.6))
  half = 0.1 * math.sqrt(2)
  assert (curve.mean[9], curve.low[9], curve.high[9]) == pytest.approx(
    (0.5, 0.5 - half, 0.5 + half)
  )
  alone = comparison.curve([workdirs.read(tmp_path / "1")], "grad/norm")
  assert 3 not in alone.x and set(alone.low) == {None}  # a value that was not finite is a gap


# --- Missing and short runs ---


def test_runs_that_are_short_missing_or_broken_are_named_and_left_out_of_the_table(paper):
  run(paper / "short", steps=7, seed=3, evaluated=False, advantage__name="gn")
  run(paper / "unevaluated", seed=4, evaluated=False, advantage__name="gn")
  run(paper / "begun", steps=0, seed=5, evaluated=False, advantage__name="gn")
  (paper / "torn").mkdir()
  (paper / "torn" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
  (paper / "broken").mkdir()
  (paper / "broken" / "config.json").write_text("[")
  made = comparison.of([str(paper), str(paper / "nothing")], "advantage gn")
  said = "\n".join(made.notes)
  for sentence in (
    "short stands at step 7 of 20: in the curves only.",
    "unevaluated is not evaluated at its last step 20",
    "begun has no training step yet",
    "torn has no config.json",
    "broken has no training step yet",
    "nothing holds no run",
  ):
    assert sentence in said
  page, text = comparison_page.page(made), comparison.as_markdown(made)
  assert "| advantage gn | 3 of 6 | 50.0 [25.2, 74.8] | – |" in text
  assert "short stands at step 7 of 20" in _Page(page).text
  json.dumps(comparison.as_json(made), allow_nan=False)


def test_a_group_without_any_finished_run_still_makes_a_page(tmp_path):
  run(tmp_path / "a", steps=3, evaluated=False)
  made = comparison.of([str(tmp_path)])
  assert "| all runs | 0 of 1 |" in comparison.as_markdown(made)
  assert "Reward a rollout" in comparison_page.page(made)


def test_end_results_can_be_taken_at_an_earlier_step(tmp_path):
  for name, steps in (("gn", 40), ("san", 20)):
    folder = run(tmp_path / name, steps=steps, planned=40, advantage__name=name, score=0.7)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    at = next(i for i, row in enumerate(rows) if row.get("step") == 20)
    rows[at + 1 : at + 1] = [{"step": 20, "eval/exact_match": 0.5}] * (name == "gn")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  made = comparison.of([str(tmp_path)], "advantage gn", step=20)
  ends = {
    label: one["end"]["eval/exact_match"]["mean"]
    for label, one in comparison.as_json(made)["groups"].items()
  }
  assert ends == {"advantage gn": 0.5, "advantage san": 0.7}


# --- The page ---


def test_the_page_shows_both_curves_and_the_table_and_needs_nothing_else(paper):
  text = comparison_page.page(comparison.of([str(paper)], "advantage gn"))
  page = _Page(text)
  assert not {"script", "link", "img", "iframe"} & set(page.tags)
  assert not [
    name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")
  ]
  for part in (
    "Reward a rollout",
    "Searches a question",
    "Held-out exact match",
    "against advantage gn",
    "+10.0",
    "[+10.0, +10.0]",
    "second encyclopedia",
    "1 hop",
    "paired by seed",
    "one standard deviation over seeds",
  ):
    assert part in page.text
  assert text.count('class="band ') >= 3 * 2


def test_hostile_names_never_become_markup(tmp_path):
  run(tmp_path / "a", advantage__name=HOSTILE)
  run(tmp_path / "b", advantage__name="gn", seed=HOSTILE)
  made = comparison.of([str(tmp_path)])
  page = _Page(comparison_page.page(made))
  assert "script" not in page.tags and "alert('x')" in page.text
  xml.etree.ElementTree.fromstring(comparison_page.picture(made))


def test_the_picture_is_an_svg_file_of_its_own(paper):
  made = comparison.of([str(paper)])
  root = xml.etree.ElementTree.fromstring(comparison_page.picture(made))
  assert root.tag == "{http://www.w3.org/2000/svg}svg"
  shown = {element.text for element in root.iter() if element.tag.endswith("text")}
  assert {"Reward a rollout", "Searches a question", "advantage san"} <= shown


def test_a_sweep_over_one_number_is_drawn_in_shades_and_many_groups_stay_apart(tmp_path):
  for alpha in (0.0, 0.5, 1.0):
    run(tmp_path / f"alpha-{alpha}", advantage__alpha=alpha)
  shades = comparison_page.looks_of(comparison.of([str(tmp_path)]))
  assert list(shades) == ["alpha 0", "alpha 0.5", "alpha 1"]
  assert sorted(shades.values()) == list(shades.values())
  assert min(shades.values()) >= (plots.PALETTE, False)
  many = plots.colors([f"group {i}" for i in range(14)])
  series = [
    plots.Series(name, [1, 2], [i, i], color, dashed=dashed)
    for i, (name, (color, dashed)) in enumerate(many.items())
  ]
  drawn = xml.etree.ElementTree.fromstring(
    plots.figure([plots.Panel("t", tuple(series))], standalone=True)
  )
  lines = [element for element in drawn.iter() if element.get("class", "").startswith("line ")]
  looks = {(line.get("class"), line.get("stroke-dasharray")) for line in lines}
  assert len(looks) == 14


def test_the_command_writes_its_files_and_refuses_in_one_sentence(paper, tmp_path):
  command = functools.partial(programs.run, "experiments/compare.py")
  out = tmp_path / "out" / "here"
  done = command(f"--out={out}", f"GRPO={paper}/gn-*", f"SAN={paper}/san-*", "--reference=GRPO")
  assert done.returncode == 0, done.stderr
  assert sorted(path.name for path in out.iterdir()) == [
    f"comparison.{kind}" for kind in ("html", "json", "md", "svg")
  ]
  assert "| SAN | 3 | 60.0" in done.stdout and (out / "comparison.md").read_text() in done.stdout
  refused = command(f"--out={out}", "/nowhere")
  assert refused.returncode == 1 and refused.stderr.startswith("there is no run in '/nowhere'")


def test_a_page_needs_neither_jax_nor_scipy_to_start():
  program = (
    "import sys; from stratified.reports import comparison_page, run_page; "
    "sys.exit(str([name for name in ('jax', 'scipy', 'torch') if name in sys.modules] or ''))"
  )
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
  assert done.stderr.strip() == "", done.stderr


def test_no_table_of_the_page_is_wider_than_ten_columns(paper):
  made = comparison.of([str(paper)], "advantage gn")
  made_tables = comparison_page._tables(made)
  assert [heading for heading, _, _ in made_tables] == [
    "",
    "Exact match × 100 by hops",
    "How the agent searched",
  ]
  shown = [name for _, head, _ in made_tables for name in head]
  head = comparison.table(made.groups, made.reference)[0]
  assert sorted(shown) == sorted([*head, "group", "group"])  # each column once, the labels thrice
  assert max(len(head) for _, head, _ in made_tables) <= 10
