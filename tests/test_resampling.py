"""Groups without advantage give way to other questions; the reward's parts reach the estimator."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest
from small_rollouts import collate, family, random_groups, trajectory
from test_train import rows, run

from stratified import advantages
from stratified.advantages import AdvantageSettings
from stratified.algorithms import Facts
from stratified.algorithms.grpo import Grpo
from stratified.algorithms.policy_loss import PolicyLossSettings
from stratified.runs import rollouts as rollouts_of_steps
from stratified.types import Question

Q, K = 4, 3


###  Which groups have a signal  ###


@pytest.mark.parametrize(
  "name, rewards, strata, lost, expected",
  [
    ("gn", [1, 0, 0], [0, 0, 1], [], True),
    ("gn", [1, 1, 1], [0, 0, 1], [], False),
    ("gn", [1, 1, 0], [0, 0, 0], [2], False),  # the one that differed was lost
    ("san", [1, 0, 0], [0, 1, 1], [], False),  # rewards differ, and no stratum has a signal
    ("san", [1, 0, 0], [0, 0, 1], [], True),
    ("reinforce", [1, 1, 1], [0, 0, 0], [], True),
    ("reinforce", [0, 0, 0], [0, 0, 0], [], False),
  ],
)
def test_a_signal_is_an_advantage_that_is_not_zero(name, rewards, strata, lost, expected):
  group = [
    dataclasses.replace(one, fault="lost" if k in lost else None)
    for k, one in enumerate(random_groups(1, K)[0])
  ]
  found = family(name).has_signal([group] * 2, [rewards, [1, 0, 1]], [strata, [0] * K], 0)
  assert found == [expected, True]


def test_a_penalty_on_length_is_a_signal():
  group = [trajectory(("prompt", [1]), ("policy", [2] * n)) for n in (3, 3, 9)]
  method = family("gn", max_tokens=10, overlong_tokens=4)
  assert method.has_signal([group], [[1, 1, 1]], [[0] * K], 0) == [True]
  assert method.has_signal([group[:2]], [[1, 1]], [[0] * 2], 0) == [False]


###  Resampling  ###


def run_steps(monkeypatch, resamples, signal, steps=(0, 1)):
  """[(groups, counts, calls)] of steps; a rollout names its question, a call what was asked."""
  calls = []

  def collect(questions, *, indices, step, samples_per_question, **how):
    calls.append((step, list(indices), [q.id for q in questions]))
    return [
      [
        trajectory(("policy", [1, 2]), question=question, sample=k)
        for k in range(samples_per_question)
      ]
      for question in questions
    ]

  monkeypatch.setattr(rollouts_of_steps.loop, "collect", collect)
  task = types.SimpleNamespace(
    questions_at=lambda step: [Question(f"{step}.{q}", "Who?", ("Ada",)) for q in range(Q)],
    tools=(), tokenizer=None, protocol=None, limits=None, seconds=0.0,
  )  # fmt: skip
  config = types.SimpleNamespace(
    loss=types.SimpleNamespace(resample_groups=resamples),
    rollout=types.SimpleNamespace(max_staleness=0, samples_per_question=K),
    data=types.SimpleNamespace(questions_per_step=Q),
    sampler=types.SimpleNamespace(release=False),
  )
  sampler = types.SimpleNamespace(load=lambda params, version: None)
  has_signal = lambda groups, step: [signal(group[0].question.id) for group in groups]
  made, found = rollouts_of_steps.Rollouts(config, task, sampler, 9, has_signal), []
  for step in steps:
    calls.clear()
    groups, _, counts = made.take(step, lambda: None)
    found.append(([group[0].question.id for group in groups], counts, list(calls)))
  return found


def test_a_question_without_signal_gives_way_to_the_one_in_its_place(monkeypatch):
  """Step 0 owns batches 0, 1, 2 and step 1 owns 3, 4, 5; question 2.1 of the last stays empty."""
  empty = {"0.1", "0.3", "1.1", "2.1", "3.0"}
  first, second = run_steps(monkeypatch, 2, lambda identity: identity not in empty)
  assert first[0] == ["0.0", "2.1", "0.2", "1.3"]
  assert first[1] == {"resampled": 3, "resampled_tokens": 3 * K * 2, "without_signal": 1}
  assert first[2] == [
    (0, [0, 1, 2, 3], ["0.0", "0.1", "0.2", "0.3"]),
    (0, [Q + 1, Q + 3], ["1.1", "1.3"]),  # random keys of their own
    (0, [2 * Q + 1], ["2.1"]),
  ]
  assert second[0] == ["4.0", "3.1", "3.2", "3.3"] and second[1]["without_signal"] == 0


def test_without_the_setting_nothing_is_sampled_anew(monkeypatch):
  first, second = run_steps(monkeypatch, 0, lambda identity: False)
  assert first[0] == ["0.0", "0.1", "0.2", "0.3"] and second[0][0] == "1.0"
  assert first[1] == {} and len(first[2]) == 1


###  The reward's parts  ###


def test_gdpo_scales_each_part_by_itself_and_then_weighs_it():
  """Float64 loop; lost rollouts are in no statistic."""
  rng = np.random.default_rng(0)
  parts, weight = rng.normal(size=(Q, K, 2)) * [1.0, 100.0], (1.0, -0.2)
  valid = np.ones((Q, K))
  valid[1, 2] = 0
  estimate = advantages.make("gdpo", num_strata=1, eps=0.01)
  found = estimate(
    np.float32(parts @ weight), np.zeros((Q, K), int), np.float32(valid), 0,
    parts_qkp=np.float32(parts), weight_p=jnp.float32(weight),
  )  # fmt: skip
  total = np.zeros((Q, K))
  for q in range(Q):
    own = valid[q] > 0
    for p in range(2):
      values = parts[q, own, p]
      total[q, own] += weight[p] * (values - values.mean()) / (values.std() + 0.01)
  used = total[valid > 0]
  expected = np.where(valid > 0, (total - used.mean()) / (used.std() + 0.01), 0)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def gdpo(**loss):
  settings = {AdvantageSettings: AdvantageSettings(name="gdpo", alpha=None)}
  settings[PolicyLossSettings] = PolicyLossSettings(**loss)
  facts = Facts(
    num_strata=3, samples_per_question=K, max_tokens=10, max_turns=3, part_weights=(1.0, 0.1)
  )
  return Grpo.make(lambda cls: settings.get(cls) or cls(), facts)


def test_parts_reach_the_credit_with_the_lengths_penalty_as_one_more():
  parts = np.random.default_rng(1).normal(size=(2, K, 2))
  groups = [
    [trajectory(("prompt", [1]), ("policy", [2] * n), sample=k) for k, n in enumerate((2, 8, 9))]
    for _ in range(2)
  ]
  rewards = parts @ (1.0, 0.1)
  method = gdpo(overlong_tokens=4)
  batch = collate(groups, rewards=rewards, algorithm=method, parts=parts)
  penalty = batch.array_qk["overlong"]
  assert penalty.min() < 0
  every = np.concatenate([np.float32(parts), penalty[..., None]], axis=-1)
  expected = advantages.gdpo(every, np.ones((2, K)), weight_p=jnp.float32([1.0, 0.1, 1.0]))
  found = method.credit(batch, None, 0).advantage_qk
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  alike = [
    [[1.0, 0.5]] * K,
    [[1.0, 0.5], [0.9, 1.5], [1.0, 0.5]],
  ]  # the sums are equal, the parts not
  assert gdpo().has_signal(groups, [[1.05] * K] * 2, [[0] * K] * 2, 0, alike) == [False, True]


@pytest.mark.parametrize(
  "name, loss, words",
  [
    ("gdpo", {"kl_in": "reward"}, "kl_in='reward' with advantage.name='gdpo'.*leave it in the los"),
    ("reinforce_batch", {"resample_groups": 2}, "resample_groups=2 asks.*'reinforce_batch'"),
  ],
)
def test_what_does_not_go_together_is_refused(name, loss, words):
  read = lambda cls: {
    AdvantageSettings: AdvantageSettings(name=name), PolicyLossSettings: PolicyLossSettings(**loss)
  }.get(cls) or cls()  # fmt: skip
  with pytest.raises(ValueError, match=words):
    Grpo.make(read, Facts(num_strata=3, samples_per_question=K, max_tokens=10, max_turns=3))


def test_a_run_resamples_and_says_so(tmp_path):
  """Half of all questions are worth nothing whoever answers them."""
  changes = {
    "advantage.name": "gdpo",
    "reward.name": "0.5*tests.live_reward:half + 0.1*invalid",
    "loss.resample_groups": 2,
    "loss.filter_groups": True,
    "data.questions_per_step": 4,
    "warm_start.num_steps": 0,
    "eval.questions": 1,
    "eval.every": 0,
  }
  done = run(tmp_path, **changes)
  assert done.returncode == 0, done.stderr[-3000:]
  steps = [row for row in rows(tmp_path) if "reward/mean" in row]
  assert len(steps) == 4
  assert sum(row["rollout/resampled"] for row in steps) > 0
  sampled = 0
  for row in steps:
    assert (row["rollout/resampled_tokens"] > 0) == (row["rollout/resampled"] > 0)
    np.testing.assert_allclose(row["advantage/filtered_share"], row["rollout/without_signal"] / 4)
    sampled += row["rollout/policy_tokens"] + row["rollout/resampled_tokens"]
    assert row["run/sampled_tokens"] == sampled and row["update/skipped"] == 0
    assert row["advantage/rms"] > 0 and "reward/half" in row
