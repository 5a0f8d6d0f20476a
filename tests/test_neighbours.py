"""Neighbours of Search-E1: loss and gradient against float64 NumPy, one sequence at a time."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from small_rollouts import decoder_config, parameters, random_groups
from test_search_e1 import SGD, weighted

from configs import baselines, search_e1
from stratified.algorithms import guide
from stratified.algorithms.guide import GuideSettings
from stratified.algorithms.pairs import PairSettings
from stratified.algorithms.search_e1 import Distillation, DistillationSettings
from stratified.algorithms.supervised import Supervised
from stratified.learner import batching, update
from stratified.learner import state as states
from stratified.learner.packing import Packing
from stratified.losses import DivergenceSettings
from stratified.policy import decoder
from stratified.runs import build

# Its output weight is no part of what makes hidden states, so that a loss's gradient there is the
# sum of (gradient in the logits) x (hidden state).
CONFIG = decoder_config(tied_embeddings=False)


LONGEST = 48
of_rows = jax.jit(functools.partial(decoder.hidden, CONFIG))


def hidden(params, tokens):
  """[T, D] of one sequence by itself; what stands after its end changes nothing before it."""
  row = np.zeros((1, LONGEST), int)
  row[0, : len(tokens)] = tokens
  found = of_rows(params, row, np.arange(LONGEST)[None], np.ones_like(row))
  return np.asarray(found[0, : len(tokens)], np.float64)


def log_softmax(z):
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def after(one, prompt):
  return [*prompt, *one.token_ids[len(one.segments[0].token_ids) :]]


def predicting(params, one, prompt=None):
  """[T, D] hidden states before each token of a rollout's rest, after another prompt or its own."""
  own = len(one.segments[0].token_ids)
  prompt = one.segments[0].token_ids if prompt is None else prompt
  return hidden(params, after(one, prompt))[len(prompt) - 1 : -1], np.asarray(one.token_ids[own:])


def rest_of(one):
  return np.asarray(one.weights[len(one.segments[0].token_ids) :])


@pytest.fixture(scope="module")
def pairs():
  """Three students, each with its weight, and two other prompts for each."""
  groups = [
    [dataclasses.replace(weighted(one), weight=weight)]
    for (one,), weight in zip(random_groups(3, 1, seed=11), (0.75, 0.2, 1.0))
  ]
  rng = np.random.default_rng(2)
  other = lambda: [
    [(*one.segments[0].token_ids, *rng.integers(1, 32, 5).tolist())] for (one,) in groups
  ]
  return groups, other(), other()


@pytest.fixture(scope="module")
def policies():
  """A student's parameters and a teacher's, and the student's output weight in float64."""
  student, teacher = parameters(CONFIG, seed=1, scale=2.0), parameters(CONFIG, scale=2.0)
  return student, teacher, np.asarray(student["head"], np.float64)


def step(mesh, algorithm, policies, groups, prompts=None, others=None):
  """(statistics, gradient in the student's output weight) of the compiled step."""
  student, teacher, _ = policies
  packing = Packing.for_rollouts(
    len(groups), length=24, teacher_length=48 if prompts else 0, rows=2
  )
  zeros = np.zeros((len(groups), 1))
  batch = batching.collate(
    groups,
    packing=packing,
    algorithm=algorithm,
    rewards=zeros,
    strata=zeros,
    num_strata=1,
    prompts=prompts,
    others=others,
  )
  learn = update.make_update(mesh, CONFIG, SGD, algorithm)
  state = states.init_state(mesh, CONFIG, dict(teacher), SGD, with_reference=bool(prompts))
  put = lambda tree: jax.device_put(tree, jax.tree.map(lambda x: x.sharding, state.params))
  state, stats = learn(state._replace(params=put(student)), batching.place(mesh, batch))
  moved = np.asarray(student["head"], np.float64) - np.asarray(state.params["head"], np.float64)
  return jax.device_get(stats), moved / 0.1  # SGD's rate


def agree(found, expected):
  np.testing.assert_allclose(found, expected, rtol=2e-4, atol=3e-6)


def imitation(policies, groups):
  """(-log q of each counted token, its gradient in the logits, hidden states) of each rollout."""
  student, _, head = policies
  for (one,) in groups:
    x, tokens = predicting(student, one)
    log_q = log_softmax(x @ head.T)
    at = np.arange(len(tokens))
    yield -log_q[at, tokens], np.exp(log_q) - np.eye(32)[tokens], x, rest_of(one)


def test_sft_on_the_reference_is_the_mean_over_rollouts_of_their_mean_cross_entropy(
  mesh, pairs, policies
):
  groups, *_ = pairs
  algorithm = Distillation(
    DistillationSettings(loss="imitation"), DivergenceSettings(), PairSettings(), GuideSettings()
  )
  stats, gradient = step(mesh, algorithm, policies, groups)
  total, expected = 0, 0
  shares = np.asarray([one.weight for (one,) in groups]) / sum(one.weight for (one,) in groups)
  for share, (loss, slope, x, counts) in zip(shares, imitation(policies, groups)):
    weight = share * counts / counts.sum()
    total, expected = total + (weight * loss).sum(), expected + (weight[:, None] * slope).T @ x
  agree(gradient, expected)
  every = np.concatenate([loss[counts > 0] for loss, _, _, counts in imitation(policies, groups)])
  agree(stats["distillation/loss"], every.mean())


def test_sft_is_the_mean_cross_entropy_of_all_target_tokens(mesh, pairs, policies):
  groups, *_ = pairs
  stats, gradient = step(mesh, Supervised(name="sft"), policies, groups)
  parts = list(imitation(policies, groups))
  count = sum(counts.sum() for *_, counts in parts)
  agree(stats["sft/loss"], sum((loss * counts).sum() for loss, _, _, counts in parts) / count)
  agree(gradient, sum((counts[:, None] * slope).T @ x for _, slope, x, counts in parts) / count)


@pytest.mark.parametrize("contrast", [0.0, 0.4, 1.0])
def test_a_contrasted_teacher_loses_what_a_wrong_hint_changes_and_pairs_count_by_weight(
  mesh, pairs, policies, contrast
):
  """SSOPD's weights and RLCSD's contrast: teacher's logits z - contrast (z' - z0)."""
  groups, prompts, others = pairs
  algorithm = Distillation(
    DistillationSettings(rank=0),
    DivergenceSettings(clip_form="none"),
    PairSettings(contrast=contrast),
    GuideSettings(),
  )
  stats, gradient = step(mesh, algorithm, policies, groups, prompts, others if contrast else None)
  student, teacher, head = policies
  frozen, expected, kls = np.asarray(teacher["head"], np.float64), 0, []
  shares = np.asarray([one.weight for (one,) in groups]) / sum(one.weight for (one,) in groups)
  for share, (one,), (prompt,), (other,) in zip(shares, groups, prompts, others):
    logits = lambda prompt, one=one: predicting(teacher, one, prompt)[0] @ frozen.T
    x, _ = predicting(student, one)
    log_p = log_softmax(logits(prompt) - contrast * (logits(other) - logits(None)))
    log_q, counts = log_softmax(x @ head.T), rest_of(one)
    weight = share * counts / counts.sum()
    expected = expected + (weight[:, None] * (np.exp(log_q) - np.exp(log_p))).T @ x
    kls.append((np.exp(log_p) * (log_p - log_q)).sum(-1)[counts > 0])
  agree(gradient, expected)
  agree(stats["distillation/kl"], np.concatenate(kls).mean())


def test_pairs_count_most_where_right_and_wrong_are_even():
  of = lambda weight: (
    Distillation(
      DistillationSettings(weight=weight), DivergenceSettings(), PairSettings(), GuideSettings()
    ).weight_of
  )
  assert [of("mixed")(share) for share in (0.0, 0.25, 0.5, 1.0)] == [0, 0.75, 1, 0]
  assert of("equal")(0.25) == of("equal")(1.0) == 1


@pytest.mark.parametrize("prefix, counted", [(1.0, 5), (0.5, 3), (0.4, 2), (0.01, 1)])
def test_of_a_prefix_the_first_counted_tokens_are_left(pairs, prefix, counted):
  ((one,),) = random_groups(1, 1, seed=4)
  one = dataclasses.replace(
    one,
    segments=tuple(
      dataclasses.replace(
        s, token_ids=(7,) * size, log_probs=(0.0,) * size * (s.origin == "policy")
      )
      for s, size in zip(one.segments, (2, 2, 4, 3))
    ),
  )
  found = guide.weights(one, "all", None, prefix)
  every = [2, 3, 8, 9, 10]
  assert [i for i, weight in enumerate(found) if weight] == every[:counted]


def test_neighbours_are_presets():
  for name, fields in search_e1.NEIGHBOURS.items():
    config = search_e1.get_config(name)
    assert config.policy.width == 128 and config.guide.before == " [ "
    for key, value in fields.items():
      section, field = key.split(".")
      assert config[section][field] == value
    build.check(config)
  config = baselines.get_config("rejection_sampling:tiny")
  config.num_steps = 40
  method = build.algorithm(config, 4)
  ((stage,),) = [method.stages(config.num_steps)]
  assert (stage.source, stage.num_steps) == ("pairs", 40) and stage.algorithm.teacher is None
  large = baselines.get_config("sft:instruct")
  assert large.rollout.protocol == "direct" and large.algorithm.name == "sft"
  assert baselines.get_config("sft").rollout.protocol == "short"
  with pytest.raises(ValueError, match="sft_demonstrations, rejection_sampling"):
    baselines.get_config("other")
