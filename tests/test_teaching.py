"""Does a policy learn from a teacher that is shown a perfect reference? On `tiny`, made small.

A short warm start on the task's script answers at once or searches once, at random, and reads in a
part of its prompts the very demonstration that follows: so it learns to use a guide. Then, on
questions of one encyclopedia, it is distilled towards itself with a reference in its prompt. What
is measured is a held-out question's right rollout against its wrong one, in an encyclopedia that it
has never seen: P(right) / (P(right) + P(wrong)), over all tokens that the policy wrote.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from configs import search_e1
from stratified import sharding
from stratified.agents import loop
from stratified.algorithms import guide
from stratified.algorithms.pairs import mine, PairSettings
from stratified.config import read
from stratified.learner import batching
from stratified.learner import state as states
from stratified.policy import decoder, log_probs
from stratified.runs import build
from stratified.runs import pairs as pair_files
from stratified.runs.stages import Demonstrations
from stratified.runs.surroundings import Surroundings, writing
from stratified.tasks import generated
from stratified.tasks.encyclopedia import pages
from stratified.tasks.encyclopedia.demonstrations import Demonstrator
from stratified.tasks.encyclopedia.questions import training_questions

LENGTH, STEPS = 256, 25
SMALL = {
  "policy.width": 64,
  "policy.num_layers": 2,
  "policy.unroll": 1,
  "policy.num_heads": 2,
  "policy.num_kv_heads": 1,
  "policy.mlp_width": 160,
  "data.entities": 120,
  "data.hop_shares": (0.5, 0.5, 0.0, 0.0),
  "warm_start.mixture": (0.5, 0.5, 0.0, 0.0),  # whatever the question needs
  "warm_start.num_steps": 150,
  "warm_start.demonstrations_per_step": 24,
  "warm_start.learning_rate": 4e-3,
  "guide.share": 0.5,
  "packing.row_length": LENGTH,
  "packing.rows": 4,
  "eval.questions": 8,
  "num_steps": STEPS,
  "search_e1.cycles": 1,
  "search_e1.distillation_steps": STEPS,
  "distillation.row_length": LENGTH,
  "distillation.pairs_per_step": 16,
  "distillation.learning_rate": 1e-3,
  "distillation.clip_form": "none",
}


@pytest.fixture(scope="module")
def run():
  config = search_e1.get_config("tiny")
  config.update_from_flattened_dict(SMALL)
  return build.build(config)


@pytest.fixture(scope="module")
def policy(run):
  """The policy after the warm start, on the host."""
  warm = run.stages[0]
  source = Demonstrations(warm, Surroundings(run, *[None] * 6), None)
  params = build.initial_params(run.config, run.model, run.mesh)
  state = states.init_state(run.mesh, run.model, params, warm.optimizer, with_reference=False)
  for step in range(warm.stage.num_steps):
    state, _ = warm.learn(state, batching.place(run.mesh, source.take(step, state)[0]))
  return jax.device_get(state.params)


def pairs_of(run, world: int, rule: str):
  """Pairs of 64 questions in a practice encyclopedia, from four rollouts each of the script."""
  config, task = run.config, run.task
  book = pages.make(read(pages.EncyclopediaConfig, config), generated.PRACTICE_SEED + 500 + world)
  script = Demonstrator(
    book, task.tokenizer, seed=77, config=generated.demonstration_config(config)
  )
  shares = config.data.hop_shares
  asked = training_questions(book, seed=5, step=world, count=64, hop_shares=shares)
  script.begin(world, asked)
  groups = loop.collect(
    asked,
    sampler=script,
    tools=generated.searching(task.tools, book.passages, config.rollout.topk),
    tokenizer=task.tokenizer,
    protocol=task.protocol,
    limits=task.limits,
    samples_per_question=4,
    step=world,
  )
  rewards = [[run.reward(one).total for one in group] for group in groups]
  return mine(groups, rewards, PairSettings(reference=rule, max_invalid_share=1.0), seed=0)


def distilled(run, policy, rule: str):
  """The policy after its distillation, with the pairs of a rule."""
  parts = run.stages[-1]
  source = pair_files.Pairs(parts, Surroundings(run, *[None] * 6), None)
  found = [pairs_of(run, world, rule) for world in (0, 1)]
  source._mined = found[0]._replace(pairs=found[0].pairs + found[1].pairs)
  params = {name: jax.numpy.array(value) for name, value in policy.items()}
  state = states.init_state(run.mesh, run.model, params, parts.optimizer, with_reference=True)
  for step in range(STEPS):
    state, _ = parts.learn(state, batching.place(run.mesh, source.take(step, state)[0]))
  return jax.device_get(state.params)


def prefers_right(run, params, pairs, hint=None) -> float:
  """P(right) / (P(right) + P(wrong)), mean over pairs; `hint` of a pair is shown in the prompt."""
  show = lambda pair, one: one if hint is None else shown(run, one, hint(pair))
  right, wrong = (
    log_prob(run, params, [show(pair, getattr(pair, part)) for pair in pairs])
    for part in ("reference", "student")
  )
  return float((1 / (1 + np.exp(wrong - right))).mean())


def shown(run, one, hint):
  """The rollout after a prompt that shows another one."""
  settings = read(guide.GuideSettings, run.config)
  ids = guide.prompt(one.question, hint, settings, **writing(run.task))
  prompt = dataclasses.replace(one.segments[0], token_ids=ids)
  return dataclasses.replace(one, segments=(prompt, *one.segments[1:]))


def log_prob(run, params, rollouts):
  """The log-probability of all that the policy wrote in each rollout."""
  token, position, segment, counts = np.zeros((4, len(rollouts), LENGTH), np.int32)
  for row, one in enumerate(rollouts):
    size = len(one.token_ids)
    token[row, :size], position[row, :size], segment[row, :size] = one.token_ids, range(size), 1
    origins = [s.origin == "policy" for s in one.segments for _ in s.token_ids]
    counts[row, :size] = origins
  axes = decoder.logical_axes(run.model)
  put = lambda name: sharding.put(params[name], sharding.named(run.mesh, axes[name]))
  params = {name: put(name) for name in params}
  with jax.set_mesh(run.mesh):
    return (np.asarray(_log_probs(run.model, params, token, position, segment)) * counts).sum(1)


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(model, params, token, position, segment):
  x = decoder.hidden(model, params, token, position, segment)
  return log_probs.token_log_probs(model, params, x, token)[0]


def test_a_policy_improves_on_held_out_questions_by_a_teacher_that_sees_a_perfect_reference(
  run, policy
):
  """And a wrong sibling in its place makes it worse: the gain is no matter of style."""
  held = pairs_of(run, 50, "fewest_searches").pairs
  before = prefers_right(run, policy, held)
  assert prefers_right(run, policy, held, hint=lambda pair: pair.reference) > before + 0.15
  assert prefers_right(run, policy, held, hint=lambda pair: pair.student) < before - 0.15
  taught = prefers_right(run, distilled(run, policy, "fewest_searches"), held)
  misled = prefers_right(run, distilled(run, policy, "random_wrong"), held)
  print(f"before {before:.3f}, taught {taught:.3f}, misled {misled:.3f}")
  assert taught > before + 0.08 and misled < before
