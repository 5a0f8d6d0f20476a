"""Methods through the one update: what each makes of rewards, and what does not fit is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from small_rollouts import collate, decoder_config, family, parameters, random_groups, trajectory

from stratified import advantages
from stratified.algorithms import Facts, make, METHODS
from stratified.algorithms.base import Algorithm, Credit, Loss
from stratified.algorithms.gigpo import anchors, Gigpo, GigpoSettings, state_ids
from stratified.algorithms.grpo import PolicyLossSettings
from stratified.learner import batching, optimizer, trial, update
from stratified.learner import state as states

CONFIG = decoder_config()
FACTS = Facts(num_strata=3, samples_per_question=4, max_tokens=24, max_turns=3)
CHAIN = optimizer.make(learning_rate=1e-2)
BESIDE = optimizer.beside(CHAIN, CHAIN)
ARRAYS = {"reward": [[1, 0, 0, 1], [0, 1, 0, 0]]}


def of(name):
  return make(name, lambda cls: cls(), FACTS)


def step(mesh, algorithm, groups, rewards, *, settings=update.UpdateSettings(), count=1):
  """(state, stats) after updates on one batch."""
  critic = algorithm.critic
  chain = BESIDE if critic else CHAIN
  learn = update.make_update(mesh, CONFIG, chain, algorithm, settings=settings, num_strata=3)
  params = parameters(CONFIG, scale=2.0)
  state = states.init_state(mesh, CONFIG, params, chain, with_reference=True, critic=critic)
  batch = collate(groups, rewards=rewards, algorithm=algorithm, mini_batches=settings.mini_batches)
  for _ in range(count):
    state, stats = learn(state, batching.place(mesh, batch))
  return state, jax.device_get(stats), batch


@pytest.mark.parametrize("name", [name for name in METHODS if name != "sft"])  # has no reward
def test_every_method_fits_the_update_and_moves_the_policy(mesh, name):
  algorithm = of(name).stages(300)[0].algorithm
  trial.check(algorithm, f"algorithm.name={name!r}")
  state, stats, _ = step(mesh, algorithm, random_groups(2, 4, seed=1), np.float32(ARRAYS["reward"]))
  assert stats["grad/norm"] > 0 and stats["update/skipped"] == 0
  assert all(np.isfinite(value).all() for value in stats.values())
  for key in ("loss/policy", "loss/kl", "advantage/rms", "strata/count", "policy/entropy"):
    assert key in stats


###  GiGPO  ###


def test_states_are_the_observations_that_are_alike():
  seen = tuple(range(10))
  nearly = seen[:9] + (99,)
  ids = state_ids([[(), seen], [(), nearly], [(), tuple(range(50, 60))]], 0.9)
  assert ids == [[0, 1], [0, 1], [0, 2]]
  assert state_ids([[(), seen], [(), nearly]], 1.0) == [[0, 1], [0, 2]]


def test_gigpo_adds_the_advantage_among_like_turns(mesh):
  """Two rollouts read the same; the one that then answers right is better in that turn."""
  read, other = [7] * 5, [8] * 5
  group = [
    trajectory(("prompt", [1]), ("policy", [2]), ("observation", read), ("policy", [3]), sample=0),
    trajectory(("prompt", [1]), ("policy", [2]), ("observation", read), ("policy", [4]), sample=1),
    trajectory(("prompt", [1]), ("policy", [5]), ("observation", other), ("policy", [3]), sample=2),
  ]
  algorithm = Gigpo(GigpoSettings(gamma=1.0), PolicyLossSettings(), 24, 3)
  assert anchors(group[0]) == [(), tuple(read)]
  reward = np.float32([[1, 0, 0]])
  batch = collate([group], rewards=reward, algorithm=algorithm)
  credit = algorithm.credit(batch, None, 0)
  episode = (reward[0] - reward.mean()) / (reward.std() + 1e-6)
  # First turns share the question's state: the same scores again. Second turns: rollouts 0 and 1
  # are a group (1, 0) -> (1, -1); rollout 2 is alone -> 0.
  expected = {
    (0, 2): 2 * episode[0], (1, 2): 2 * episode[1], (2, 5): 2 * episode[2],
    (0, 3): episode[0] + 1, (1, 4): episode[1] - 1, (2, 3): episode[2],
  }  # fmt: skip
  found = {}
  for index in zip(*np.nonzero(batch.policy_art)):
    key = int(batch.trajectory_art[index]), int(batch.token_art[index])
    found[key] = float(credit.token["advantage"][index])
  assert found.keys() == expected.keys()
  for key, value in expected.items():
    np.testing.assert_allclose(found[key], value, rtol=2e-5)


###  What does not fit  ###


@dataclasses.dataclass(frozen=True)
class Flawed(Algorithm):
  """Right but for the flaw."""

  flaw: str = ""

  def credit(self, batch, before, step):
    advantage_qk = batch.reward_qk[:, 0] if self.flaw == "shape" else batch.reward_qk
    scale = np.inf if self.flaw == "infinite" else 1.0
    return Credit(advantage_qk * scale, {"advantage": batch.reward_qk}, {})

  def losses(self, outputs, before, credit, micro):
    loss = -credit["advantage"] * outputs.logp
    name = "other" if self.flaw == "stream" else "policy"
    return {name: Loss(loss.sum() if self.flaw == "loss" else loss)}


@pytest.mark.parametrize(
  "flaw, words",
  [
    ("shape", r"gives credit 'advantage_qk' of shape \[1\]; it must be \[1, 4\]"),
    ("infinite", "gives credit 'advantage_qk' that is not finite"),
    ("stream", "gives a loss 'other' without a stream of that name"),
    ("loss", r"gives a loss 'policy' of shape \[\]; it must be \[4, 8\]"),
  ],
)
def test_a_method_that_does_not_fit_is_refused_in_words(flaw, words):
  trial.check(Flawed(), "algorithm.name='mine:Flawed'")
  with pytest.raises(ValueError, match=f"algorithm.name='mine:Flawed': Flawed {words}"):
    trial.check(Flawed(flaw), "algorithm.name='mine:Flawed'")


def test_names_that_are_no_method_are_refused():
  with pytest.raises(ValueError, match="algorithm.name='sarsa' is unknown; choose one of grpo"):
    of("sarsa")
  with pytest.raises(ValueError, match="algorithm.name is 'math:tau'"):
    of("math:tau")
  assert family().SETTINGS


###  Estimators from outside  ###

SOURCE = """
import jax.numpy as jnp
def right(reward_k, stratum_k, *, num_strata, mask_k, eps, ddof): return mask_k * (reward_k - 0.5)
def short(reward_k, stratum_k, *, num_strata, mask_k, eps, ddof): return reward_k[:2]
def infinite(reward_k, stratum_k, *, num_strata, mask_k, eps, ddof): return reward_k / 0.0
def bare(reward_k, stratum_k, *, num_strata, mask_k, eps, ddof):
  return (reward_k - reward_k.mean()) / reward_k.std()
def narrow(reward_k): return reward_k
def broken(reward_k, stratum_k, *, num_strata, mask_k, eps, ddof): return reward_k.nothing
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
  (tmp_path / "mine_of_tests.py").write_text(SOURCE)
  monkeypatch.syspath_prepend(str(tmp_path))
  return "mine_of_tests"


def test_an_estimator_from_outside_is_mapped_over_questions_like_any_other(mine):
  estimate = advantages.make(f"{mine}:right", num_strata=2)
  reward_qk, valid_qk = np.float32(ARRAYS["reward"]), np.float32([[1, 1, 1, 0], [1, 1, 1, 1]])
  found = estimate(reward_qk, np.zeros((2, 4), np.int32), valid_qk, 0)
  np.testing.assert_array_equal(found, valid_qk * (reward_qk - 0.5))


@pytest.mark.parametrize(
  "name, words",
  [
    ("short", "it must return one number a rollout"),
    ("infinite", "advantages must be finite"),
    ("bare", "advantages must be finite"),  # of a group of equal rewards
    ("narrow", r"whose signature is \(reward_k\); it is called with reward_k, stratum_k"),
    ("broken", "failed on a made-up rollout with AttributeError"),
    ("absent", "has no 'absent'"),
  ],
)
def test_an_estimator_from_outside_that_can_not_serve_is_refused_in_words(mine, name, words):
  with pytest.raises(ValueError, match=f"advantage.name is '{mine}:{name}'.*{words}"):
    advantages.AdvantageSettings(name=f"{mine}:{name}")
