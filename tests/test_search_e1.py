"""Search-E1: stages, teachers and students in packed rows, the step against a float64 reference."""

import dataclasses

import jax
import numpy as np
import pytest
from small_rollouts import decoder_config, parameters, random_groups

from stratified.algorithms.guide import GuideSettings
from stratified.algorithms.pairs import PairSettings
from stratified.algorithms.search_e1 import Distillation, DistillationSettings, Student
from stratified.learner import batching, optimizer, update
from stratified.learner import state as states
from stratified.losses import DivergenceSettings
from stratified.policy import decoder, lora

CONFIG = decoder_config()
LORA = lora.LoraConfig(4, 8.0)
SGD = optimizer.make(name="sgd", learning_rate=0.1, clip_norm=1e9)


def distillation(between=DivergenceSettings(), **settings):
  return Distillation(DistillationSettings(**settings), between, PairSettings(), GuideSettings())


def students(count: int, seed: int = 0):
  """[count][1] rollouts whose policy tokens all count."""
  groups = random_groups(count, 1, seed=seed)
  return [[weighted(one)] for (one,) in groups]


def weighted(one, weights=None):
  fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
  every = [float(s.origin == "policy") for s in one.segments for _ in s.token_ids]
  return Student(**fields, weights=tuple(every if weights is None else weights))


def batch_of(groups, prompts, algorithm, *, length=24, teacher_length=48, rows=2):
  packing = batching.Packing.for_rollouts(
    len(groups), length=length, teacher_length=teacher_length, rows=rows
  )
  zeros = np.zeros((len(groups), 1))
  return batching.collate(
    groups,
    packing=packing,
    algorithm=algorithm,
    rewards=zeros,
    strata=zeros,
    num_strata=1,
    prompts=prompts,
  )


def own_prompts(groups):
  return [[one.segments[0].token_ids] for (one,) in groups]


def guided_prompts(groups, seed=5):
  rng = np.random.default_rng(seed)
  guide = lambda: tuple(rng.integers(1, 32, rng.integers(2, 12)).tolist())
  return [[(*one.segments[0].token_ids, *guide())] for (one,) in groups]


def test_a_teacher_reads_each_rollout_after_its_own_prompt_and_every_token_is_found_there():
  groups = students(5)
  prompts = guided_prompts(groups)
  batch = batch_of(groups, prompts, distillation())
  taught, seen = batch.teacher_art, set()
  for (one,), (prompt,) in zip(groups, prompts):
    own, size = one.token_ids, len(one.segments[0].token_ids)
    q = groups.index([one])
    where = np.argwhere((batch.trajectory_art == q) & (batch.segment_art > 0))
    assert [batch.token_art[tuple(at)] for at in where] == own
    for number, at in enumerate(where):
      a, r, _ = at
      there = taught["at"][tuple(at)]
      if number >= size:
        assert taught["token"][a, r, there] == own[number]
        assert taught["position"][a, r, there] == number - size + len(prompt)
        assert taught["segment"][a, r, there] == batch.segment_art[tuple(at)]
    row = taught["segment"][a, r] == batch.segment_art[tuple(where[0])]
    assert taught["token"][a, r][row].tolist() == [*prompt, *own[size:]]
    seen.add((a, r))
  assert len(seen) < 5  # some shared a row


def learn(mesh, algorithm, batch, *, adapter=None, params=None, count=1, chain=SGD):
  step = update.make_update(mesh, CONFIG, chain, algorithm, adapter=adapter)
  params = parameters(CONFIG, scale=2.0) if params is None else params
  state = states.init_state(mesh, CONFIG, params, chain, with_reference=True, adapter=adapter)
  before = jax.device_get(state.params)
  for _ in range(count):
    state, stats = step(state, batching.place(mesh, batch))
  return before, jax.device_get(state), jax.device_get(stats)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["every weight", "adapters"])
def test_without_a_reference_both_passes_agree_and_nothing_moves(mesh, adapter):
  groups = students(5)
  algorithm = distillation()
  batch = batch_of(groups, own_prompts(groups), algorithm, teacher_length=24)
  before, state, stats = learn(mesh, algorithm, batch, adapter=adapter)
  assert stats["distillation/loss"] == 0 and stats["distillation/kl"] == 0
  assert stats["grad/norm"] == 0
  jax.tree.map(np.testing.assert_array_equal, state.params, before)


def log_probs(params, tokens):
  """[T, V] of the next token after each, of one sequence by itself."""
  tokens = np.asarray(tokens)[None]
  rows = np.arange(tokens.shape[1])[None], np.ones_like(tokens)
  x = decoder.hidden(CONFIG, params, tokens, *rows)
  z = np.asarray(x[0], np.float64) @ np.asarray(decoder.output_weight(CONFIG, params), np.float64).T
  z -= z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def test_the_step_is_the_mean_over_pairs_of_the_mean_over_their_tokens(mesh):
  """Against one sequence at a time, in float64; the student differs from the teacher in weights."""
  groups = students(5, seed=3)
  prompts = guided_prompts(groups)
  algorithm = distillation(DivergenceSettings(clip_form="none"))
  params, other = parameters(CONFIG, scale=2.0), parameters(CONFIG, seed=1, scale=2.0)
  batch = batch_of(groups, prompts, algorithm)
  step = update.make_update(mesh, CONFIG, SGD, algorithm)
  state = states.init_state(mesh, CONFIG, dict(params), SGD, with_reference=True)
  put = lambda tree: jax.device_put(tree, jax.tree.map(lambda x: x.sharding, state.params))
  state = state._replace(params=put(other))
  _, stats = step(state, batching.place(mesh, batch))
  kls = []
  for (one,), (prompt,) in zip(groups, prompts):
    own, size = one.token_ids, len(one.segments[0].token_ids)
    student = log_probs(other, own)
    teacher = log_probs(params, [*prompt, *own[size:]])
    counts = np.asarray(one.weights) > 0
    at = np.nonzero(counts)[0]
    p, q = teacher[at - 1 + len(prompt) - size], student[at - 1]
    kls.append((np.exp(p) * (p - q)).sum(-1))
  np.testing.assert_allclose(stats["distillation/kl"], np.concatenate(kls).mean(), rtol=2e-5)
  assert stats["distillation/loss"] == stats["distillation/kl"]
