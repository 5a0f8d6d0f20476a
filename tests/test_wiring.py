"""Every field of a method reaches the numbers: a changed field changes them, alone.

The parts come from a config as `runs.build` makes them, so that a field which is read and dropped,
or handed to the wrong part, fails here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_rollouts import collate, random_groups, trajectory

from configs import search_e1, search_r1
from stratified.algorithms.base import Critic, Outputs
from stratified.learner import update
from stratified.runs import build, settings, stage_parts
from stratified.types import Call, Question, Turn

# field: (what else must be set for it to matter, another value than the preset's or that).
CASES = {
  "algorithm.name": ({}, "ppo"),
  "advantage.name": ({}, "gn"),
  "advantage.alpha": ({}, 0.1),
  "advantage.eps": ({}, 0.3),
  "advantage.ddof": ({}, 1),
  "advantage.alpha_end": ({"advantage.alpha_steps": 4, "advantage.alpha_end": 0.5}, 0.0),
  "advantage.alpha_steps": ({"advantage.alpha_end": 0.0, "advantage.alpha_steps": 4}, 2),
  "advantage.kappa": ({"advantage.name": "shrunk"}, 3.0),
  "advantage.lam": ({"advantage.name": "two_term"}, 0.2),
  "advantage.over": ({}, "batch"),
  "advantage.fallback": ({"advantage.name": "san"}, "gn"),
  "advantage.fallback_on": ({"advantage.name": "san", "advantage.fallback": "gn"}, "constant"),
  "advantage.match_rms": ({}, "question"),
  "loss.clip_ratio": ({}, 0.01),
  "loss.clip_ratio_high": ({}, 0.01),
  "loss.dual_clip": ({}, 1.01),
  "loss.kl_coefficient": ({}, 0.5),
  "loss.kl_estimator": ({"loss.kl_coefficient": 0.5}, "k1"),
  "loss.aggregation": ({}, "sequence_mean"),
  "loss.old_log_probs": ({}, "sampler"),
  "loss.importance": ({"loss.importance_cap": 1.5}, "sequence"),
  "loss.importance_cap": ({}, 1.05),
  "loss.surrogate": ({}, "gspo"),
  "loss.sapo_temperature": ({"loss.surrogate": "sapo"}, 3.0),
  "loss.sapo_temperature_negative": ({"loss.surrogate": "sapo"}, 3.0),
  "loss.kl_in": ({"loss.kl_coefficient": 0.5}, "reward"),
  "loss.entropy_coefficient": ({}, 0.1),
  "loss.overlong_tokens": ({"rollout.max_tokens": 20}, 18),
  "loss.overlong_penalty": ({"rollout.max_tokens": 20, "loss.overlong_tokens": 18}, 0.3),
  "loss.filter_groups": ({"advantage.name": "stratified"}, True),
  "loss.reject_below": ({}, 0.99),
  "loss.reject_above": ({}, 1.01),
  "likelihood.coefficient": ({}, 0.3),
  "likelihood.gate": ({"likelihood.coefficient": 0.3}, "token"),
  "likelihood.normalizer": ({"likelihood.coefficient": 0.3}, "all"),
  "likelihood.answer_weight": ({"likelihood.coefficient": 0.3}, "paper"),
  "ppo.gamma": ({"algorithm.name": "ppo"}, 0.5),
  "ppo.lam": ({"algorithm.name": "ppo"}, 0.5),
  "ppo.whiten": ({"algorithm.name": "ppo"}, False),
  "ppo.value_coefficient": ({"algorithm.name": "ppo"}, 2.0),
  "ppo.value_clip": ({"algorithm.name": "ppo"}, 0.01),
  "ppo.level": ({"algorithm.name": "ppo"}, "turn"),
  "ppo.through_observations": ({"algorithm.name": "ppo"}, True),
  "ppo.by_calls": ({"algorithm.name": "ppo"}, True),
  "gigpo.gamma": ({"algorithm.name": "gigpo"}, 0.3),
  "gigpo.omega": ({"algorithm.name": "gigpo"}, 0.3),
  "gigpo.similarity": ({"algorithm.name": "gigpo"}, 0.5),
  "gigpo.normalize": ({"algorithm.name": "gigpo"}, False),
}
SECTIONS = ("advantage", "loss", "likelihood", "ppo", "gigpo", "algorithm")


CRITIC = {
  "ppo.body": "own",
  "ppo.alone_steps": 3,
  "ppo.optimizer": "sgd",
  "ppo.learning_rate": 0.1,
  "ppo.warmup_steps": 2,
  "ppo.clip_norm": 0.01,
}


def test_every_field_of_a_method_has_a_case():
  fields = {name for name in settings.rules() if name.split(".")[0] in SECTIONS}
  assert fields == CASES.keys() | CRITIC.keys() | {"loss.resample_groups"}  # test_resampling.py


def test_the_critic_is_what_the_config_says():
  of = lambda changes: build.algorithm(config_of({"algorithm.name": "ppo"} | changes), 4).critic
  s = {name.removeprefix("ppo."): value for name, value in CRITIC.items()}
  optimizer = {"name": s["optimizer"]} | {
    name: s[name] for name in ("learning_rate", "warmup_steps", "clip_norm")
  }
  assert of(CRITIC) == Critic({"value": 1}, optimizer, "own", 3)
  assert of({"ppo.by_calls": True}).heads == {"value": 4}  # 0 to 3 calls
  assert build.algorithm(config_of({}), 4).critic is None


def test_the_critics_optimizer_moves_it_alone_and_counts_steps_not_updates():
  config = config_of(CRITIC | {"algorithm.name": "ppo", "update.epochs": 2})
  critic = build.algorithm(config, 4).critic
  chain = stage_parts.optimizer(config, critic=critic)
  trained = {"policy": {"gate": jnp.ones((1, 3, 4))}, "critic": {"value": jnp.ones((4, 1))}}
  updates, state = chain.update(trained, chain.init(trained), trained)
  # SGD: rate 0.1 over 4 updates' warm-up, the gradient's norm 2 clipped to 0.01.
  np.testing.assert_allclose(updates["critic"]["value"], -0.1 / 4 * 0.01 / 2, rtol=1e-5)


def config_of(changes):
  config = search_r1.get_config("tiny")
  base = {"advantage.name": "blend", "loss.filter_groups": False, "optimizer.name": "muon"}
  config.update_from_flattened_dict(base | changes)
  return config


def rollouts():
  """Two questions, four rollouts; turns repeat a state, nearly repeat one, differ, or are one."""
  groups = random_groups(2, 4, seed=6, longest=16)
  seen = (11, 12, 13, 14, 15, 16)
  for q, group in enumerate(groups):
    for k in (0, 1, 2):
      read = (*seen[:4], 20 + k, 16) if k == 2 else seen
      group[k] = trajectory(
        ("prompt", [1]),
        ("policy", [2, 3 + k]),
        ("observation", list(read)),
        ("policy", [4 + q]),
        sample=k,
        question=Question(f"q{q}", "Who?", ("Ada",)),
        searches=1,
        answer="Ada",
      )
    group[3] = trajectory(("prompt", [1]), ("policy", [2, 9]), sample=3)
  return groups


def numbers(changes) -> np.ndarray:
  """Loss and gradient of the config's method in the outputs of a fixed batch, at step 1."""
  return numbers_of(tuple(sorted(changes.items())))


@functools.cache  # most cases change one field of the same config
def numbers_of(changes) -> np.ndarray:
  config = config_of(dict(changes))
  algorithm = build.algorithm(config, num_strata=4)
  rng = np.random.default_rng(3)
  batch = collate(
    rollouts(),
    rewards=np.float32([[1, 0, 0.5, 1], [1, 1, 1, 0.25]]),
    strata=np.array([[0, 0, 1, 2], [1, 1, 1, 0]]),
    num_strata=4,
    algorithm=algorithm,
    rows=8,
    length=24,
  )
  shape = batch.token_art.shape
  drawn = lambda scale: jnp.asarray(rng.normal(-1.5, scale, shape), jnp.float32)

  more = jnp.asarray(np.random.default_rng(4).normal(0, 0.5, (*shape, 3)), jnp.float32)

  def heads():
    value = drawn(0.5) + 1.5
    size = algorithm.critic.heads["value"] if algorithm.critic else 1
    return {"value": value if size == 1 else jnp.stack([value, *jnp.moveaxis(more, -1, 0)], -1)}

  before = Outputs(drawn(0.4), drawn(0.1), drawn(0.4), heads())
  after = before._replace(logp=before.logp + drawn(0.3) + 1.5, heads=heads())
  batch = batch._replace(sampler_logp_art=np.asarray(drawn(0.4)) * batch.policy_art)
  credit = algorithm.credit(batch, before, 1)
  by_token = {n: x if x.ndim == 3 else update.flat(x) for n, x in credit.token.items()}
  micro, micro_before, by_token = update._micro_batch(batch, before, by_token, 0)
  counts = update._counts(batch, 0, 1, credit.valid)

  def loss(outputs):
    return update._weighted(algorithm.losses(outputs, micro_before, by_token, micro), micro, counts)

  outputs = jax.tree.map(lambda x: x[0], after)
  (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(outputs)
  of_value = gradient.heads["value"].reshape(*gradient.logp.shape, -1).sum(-1)
  return np.concatenate([np.ravel(x) for x in (value, gradient.logp, of_value)])


@pytest.mark.parametrize("field", CASES)
def test_a_changed_field_changes_the_update(field):
  base, value = CASES[field]
  before, after = numbers(base), numbers(base | {field: value})
  assert np.isfinite(before).all() and np.isfinite(after).all()
  assert np.abs(after - before).max() > 1e-6, field


OPTIMIZER = {
  "optimizer.name": ({}, "adamw"),
  "optimizer.learning_rate": ({}, 1e-2),
  "optimizer.warmup_steps": ({}, 2),
  "optimizer.decay_steps": ({"optimizer.warmup_steps": 0}, 2),
  "optimizer.weight_decay": ({}, 0.5),
  "optimizer.clip_norm": ({"optimizer.name": "sgd"}, 0.01),
  "optimizer.b1": ({"optimizer.name": "adamw"}, 0.1),
  "optimizer.b2": ({"optimizer.name": "adamw"}, 0.1),
  "optimizer.embedding_rate": ({}, 0.5),
  "update.epochs": ({}, 3),
  "update.mini_batches": ({}, 4),
}


def steps(changes) -> np.ndarray:
  """A weight and a norm after two updates by the config's optimizer with fixed gradients."""
  chain = stage_parts.optimizer(config_of(changes))
  rng = np.random.default_rng(0)
  params = {"gate": jnp.ones((1, 3, 4)), "final_norm": jnp.ones(4)}
  state = chain.init(params)
  for _ in range(2):
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    moves, state = chain.update(gradient, state, params)
    params = jax.tree.map(jnp.add, params, moves)
  return np.concatenate([np.ravel(x) for x in params.values()])


@pytest.mark.parametrize("field", OPTIMIZER)
def test_a_changed_field_changes_the_optimizers_steps(field):
  base, value = OPTIMIZER[field]
  assert np.abs(steps(base) - steps(base | {field: value})).max() > 1e-7, field


def test_every_field_of_the_optimizer_has_a_case():
  fields = {name for name in settings.rules() if name.split(".")[0] in ("optimizer", "update")}
  assert fields == OPTIMIZER.keys()


def searched(*queries):
  turn = Turn("call", "", tuple(Call("search", query, "hit", ("1",)) for query in queries))
  made = trajectory(("prompt", [1]), ("policy", [2]), answer="Ada")
  return dataclasses.replace(made, turns=(turn,))


def test_partition_and_its_cap_come_from_the_config():
  group = [searched(*"abcde"[:n]) for n in range(1, 6)]
  ids = lambda **changes: build.partition(
    config_of({f"strata.{key}": value for key, value in changes.items()})
  ).assign(group)
  assert ids() == [1, 2, 3, 3, 3] and ids(cap=1) == [1] * 5 and ids(name="answered") == [1] * 5


def test_the_stages_of_a_run_are_made_as_the_config_says():
  config = config_of(
    {"update.epochs": 2, "update.mini_batches": 4, "warm_start.num_steps": 7, "num_steps": 300}
  )
  run = build.assemble(config, build.mesh_of(config), build.model_config(config))
  warm, main = run.stages
  assert (warm.stage.num_steps, main.stage.num_steps) == (7, 300)
  assert warm.stage.algorithm.context_weight == 0.3 and main.packing.mini_batches == 4
  assert dataclasses.replace(main.packing, micro=0).rows == config.packing.rows


def test_stages_that_are_made_of_the_same_share_one_update_and_others_do_not():
  def updates(**changes):
    config = search_e1.get_config("tiny")
    config.update_from_flattened_dict({"search_e1.cycles": 2} | changes)
    run = build.assemble(config, build.mesh_of(config), build.model_config(config))
    return {parts.stage.name: parts.learn for parts in run.stages}

  found, clipped = updates(), updates(**{"loss.clip_ratio": 0.125})
  assert found["reinforcement_1"] is found["reinforcement_2"]
  assert found["distillation_1"] is found["distillation_2"]
  assert len({id(found[name]) for name in found}) == 3  # with the warm start's
  assert clipped["reinforcement_1"] is not found["reinforcement_1"]
  assert clipped["distillation_1"] is found["distillation_1"]
