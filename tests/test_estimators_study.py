"""The study of the estimators: its bandits obey the theory, its page holds what its command
makes."""

import pathlib
import re
import xml.etree.ElementTree

import jax
import numpy as np
import pytest

from experiments.studies import bandits
from experiments.studies import estimators_study as study
from experiments.studies import estimators_tables as tables
from stratified.advantages import theory

PAGE = pathlib.Path(study.__file__).parent / "ESTIMATORS.md"
STEPS = 40


@pytest.fixture(scope="module")
def trained():
  """Four seeds of a few estimators, every setting."""
  return study.train(study.settings(), 4, STEPS, ("gn", "san", "blend 0.6"))


def groups(bandit, shared, number=64):
  """A setting's starting parameters and a sample of rollouts from them."""
  setting = bandits.Setting(bandit, shared, False)
  params = bandits.start(setting)
  p_sa = np.exp(bandits.log_policy(params, shared))
  return setting, params, p_sa, bandits.sample(jax.random.key(3), p_sa, bandit.success_sa, number)


@pytest.mark.parametrize("shared", [False, True])
def test_both_policies_start_from_the_bandits_probabilities(shared):
  bandit = bandits.learnt(0.15)
  _, _, p_sa, (pair_qk, reward_qk) = groups(bandit, shared, 20_000)
  expected_sa = bandit.choice_s[:, None] * bandit.act_sa
  np.testing.assert_allclose(p_sa, expected_sa, rtol=1e-5)
  pair, reward = np.asarray(pair_qk).ravel(), np.asarray(reward_qk).ravel()
  for i, (p, rate) in enumerate(zip(expected_sa.ravel(), bandit.success_sa.ravel())):
    drawn = pair == i
    assert abs(drawn.mean() - p) < 5 * np.sqrt(p / drawn.size)
    assert abs(reward[drawn].mean() - rate) < 5 * np.sqrt(rate / drawn.sum())


def test_with_separate_parameters_san_leaves_the_choice_and_gn_moves_it(trained):
  share = {name: trained[name]["better", 0.2, False, False].share for name in trained}
  assert np.abs(share["san"] - 0.2).max() < 1e-6
  assert (share["gn"][:, -1] > 0.8).all()
  assert (np.diff([share[name][:, 8].mean() for name in ("san", "blend 0.6", "gn")]) > 0.1).all()


def test_in_bandit_b_gn_drops_the_strategy_and_san_learns_inside_it(trained):
  gn, san = (trained[name]["learnt", 0.1, False, True] for name in ("gn", "san"))
  assert (gn.share[:, -1] < 0.05).all()
  np.testing.assert_allclose(san.share, 0.1, atol=1e-6)
  assert san.success[:, -1].mean() > san.success[:, 0].mean() + 0.005


def test_a_drawn_strategy_is_never_moved(trained):
  for curves in trained.values():
    np.testing.assert_allclose(curves["luck", 0.5, False, True].share, 0.5, atol=1e-6)
    assert (np.diff(curves["luck", 0.5, False, True].reward[:, [0, -1]]) > 0.03).all()


def test_blend_pushes_the_choice_by_one_minus_alpha_of_gn():
  setting = bandits.Setting(bandits.learnt(), False, False)
  pushes = {
    name: np.asarray(bandits.first_push(one, setting, jax.random.key(1), 500)[0])
    for name, one in bandits.estimators(STEPS).items()
    if name in ("gn", "san", "blend 0.6")
  }
  np.testing.assert_allclose(pushes["san"], 0, atol=1e-6)
  assert np.abs(pushes["gn"]).mean() > 0.01
  np.testing.assert_allclose(pushes["blend 0.6"], 0.4 * pushes["gn"], atol=1e-6)


def test_with_shared_parameters_san_keeps_the_mean_logit_of_a_stratum_and_gn_does_not():
  setting, params, p_sa, (pair_qk, reward_qk) = groups(bandits.learnt(), True)
  moved = {}
  for name in ("gn", "san"):
    one = bandits.estimators(STEPS)[name]
    advantage_qk = bandits.estimated(one, setting, pair_qk, reward_qk, jax.random.key(0), 0)
    log_p = lambda x: (advantage_qk * bandits.log_policy(x, True).ravel()[pair_qk]).sum()
    moved[name] = np.abs(np.asarray(jax.grad(log_p)(params)[1]).sum(axis=1)).max()
  assert moved["san"] < 1e-4
  assert moved["gn"] > 1


def test_simulations_agree_with_the_closed_forms():
  for p_s, q_s in tables.SHARES.values():
    exact = [
      *(theory.expected_zero_share(name, p_s, q_s, 8) for name in ("san", "gn")),
      theory.expected_singleton_share(p_s, 8),
    ]
    for seen, expected in zip(tables.simulated_shares(p_s, q_s, 4000), exact):
      assert abs(seen.mean() - expected) < 5 * seen.std() / np.sqrt(seen.size)
  for name, q in tables.ATTENUATED:
    seen = np.asarray(tables.simulated_attenuation(name, 0.2, q or 0.3, jax.random.key(0), 4000))
    assert abs(seen.mean() - theory.attenuation(name, 0.2, 8, q)) < 5 * seen.std() / np.sqrt(
      seen.size
    )


def test_tables_have_a_row_for_each_estimator_and_figures_are_xml(trained):
  made = [
    tables.reward_table(trained, "better", 0.2),
    tables.inside_table(trained),
    tables.speed_table(trained),
    tables.start_table(trained),
    tables.luck_table(trained),
  ]
  for table in made:
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == list(trained)
    assert len({line.count("|") for line in table.splitlines()}) == 1 and "nan" not in table
  for figure in (
    *(study.reward_figure(trained, "better", 0.2, family) for family in study.FAMILIES),
    study.mechanism_figure(trained),
    study.attenuation_figure(),
  ):
    assert xml.etree.ElementTree.fromstring(figure).tag.endswith("svg")


def test_steps_until_reads_the_first_step_and_says_never():
  reached = np.zeros((10, 50), bool)
  assert tables.steps_until(reached) == "never"
  for seed in range(9):
    reached[seed, 10 + seed] = True
  assert tables.steps_until(reached) == "14 (10 to 18)"


def test_the_page_is_refused_when_its_blocks_are_not_the_tables():
  page = "a\n<!-- made: x -->\nold\n<!-- end -->\nb\n"
  filled = study.fill(page, {"x": "new"})
  assert "old" not in filled and filled == study.fill(filled, {"x": "new"})
  assert filled.startswith("a\n") and filled.endswith("b\n")
  with pytest.raises(ValueError, match="marks the tables x, but y were made"):
    study.fill(page, {"y": "new"})


def test_the_committed_page_holds_the_closed_forms_and_every_figure_that_it_shows():
  page = PAGE.read_text(encoding="utf-8")
  for title, (p_s, q_s) in tables.SHARES.items():
    row = next(line for line in page.splitlines() if line.startswith(f"| {title} |"))
    assert f"{theory.expected_zero_share('san', p_s, q_s, 8):.3f} (" in row
  for p in tables.PROBABILITIES:
    row = next(line for line in page.splitlines() if line.startswith(f"| {p:.2f} |"))
    for name, q in tables.ATTENUATED:
      assert f"{theory.attenuation(name, p, 8, q):.3f} (" in row
  shown = re.findall(r"\]\((figures/\w+\.svg)\)", page)
  assert len(shown) == 8
  for name in shown:
    drawn = xml.etree.ElementTree.parse(PAGE.parent / name)
    assert len(drawn.findall(".//{*}text[@class='k']")) <= 6, "more than a reader can follow"
