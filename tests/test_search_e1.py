"""Search-E1: stages, teachers and students in packed rows, the step against a float64 reference."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from small_rollouts import decoder_config, OneCharacterEach, parameters, random_groups, trajectory

from configs import search_e1 as search_e1_config
from stratified.algorithms import Facts, guide, make, search_e1
from stratified.algorithms.guide import GuideSettings
from stratified.algorithms.pairs import PairSettings
from stratified.algorithms.search_e1 import Distillation, DistillationSettings, Student
from stratified.learner import batching, optimizer, update
from stratified.learner import state as states
from stratified.learner.packing import Packing
from stratified.losses import DivergenceSettings
from stratified.planning import compiled
from stratified.policy import decoder, divergence, lora
from stratified.runs import build, stage_parts
from stratified.runs import pairs as pair_files
from stratified.runs.stop import Unusable
from stratified.types import Call, Segment, Turn

CONFIG = decoder_config()
LORA = lora.LoraConfig(4, 8.0)
FACTS = Facts(num_strata=3, samples_per_question=4, max_tokens=24, max_turns=3)
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
  packing = Packing.for_rollouts(
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


LONGEST = 48
of_rows = jax.jit(functools.partial(decoder.hidden, CONFIG))


def log_probs(params, tokens):
  """[T, V] of the next token after each, of one sequence by itself.

  What stands after its end changes nothing before it.
  """
  row = np.zeros((1, LONGEST), int)
  row[0, : len(tokens)] = tokens
  x = of_rows(params, row, np.arange(LONGEST)[None], np.ones_like(row))[:, : len(tokens)]
  z = np.asarray(x[0], np.float64) @ np.asarray(decoder.output_weight(CONFIG, params), np.float64).T
  z -= z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def test_the_logged_divergence_is_the_mean_over_the_tokens_that_count(mesh):
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


@pytest.mark.parametrize(
  "span, expected",
  [
    ("all", [0, 0, 1, 1, 1, 1, 0, 1, 1]),
    ("think_search", [0, 0, 1, 1, 1, 1, 0, 0, 0]),
    ("search", [0, 0, 0, 0, 1, 1, 0, 0, 0]),
  ],
)
def test_a_span_counts_all_policy_tokens_those_of_searching_turns_or_the_queries_alone(
  span, expected
):
  text = {1: "Q", 2: "?", 3: "hm ", 4: "<s>", 5: "who", 6: " ada</s>", 7: "doc", 8: "<a>", 9: "x"}
  decode = lambda ids: "".join(text[i] for i in ids)
  one = trajectory(("prompt", [1, 2]), ("policy", [3, 4, 5, 6]), ("observation", [7]))
  turns = (Turn("call", "", (Call("search", "who ada", "hit"),)), Turn("answer", ""))
  one = dataclasses.replace(
    one, segments=(*one.segments, Segment((8, 9), "policy", (-1.0, -1.0))), turns=turns
  )
  assert guide.weights(one, span, decode) == tuple(map(float, expected))


@pytest.mark.parametrize(
  "shown, expected",
  [
    ("full", "hm<s>ada</s>(doc ada)<a>ada!</a>"),
    ("no_answer", "hm<s>ada</s>(doc ada)<a>"),
    ("no_documents", "hm<s>ada</s><a>ada!</a>"),
    ("queries_only", "ada"),
  ],
)
def test_a_guide_shows_of_the_reference_what_is_set(shown, expected):
  tokenizer = OneCharacterEach()
  part = lambda origin, text: (origin, tokenizer.encode(text))
  one = trajectory(
    part("prompt", "Who?"),
    part("policy", "hm<s>ada</s>"),
    part("observation", "(doc ada)"),
    ("policy", [*tokenizer.encode("<a>ada!</a>"), tokenizer.eos_id]),
    answer="ada!",
  )
  one = dataclasses.replace(one, turns=(Turn("call", "", (Call("search", "ada", "hit"),)),))
  settings = GuideSettings(shown=shown, before="[", after="]")
  ids = guide.prompt(
    one.question,
    one,
    settings,
    write=lambda question: f"Q: {question}\nA:",
    encode=tokenizer.encode,
    decode=tokenizer.decode,
    eos_id=tokenizer.eos_id,
  )
  assert tokenizer.decode(ids) == f"Q: Who?[{expected}]\nA:"


def test_a_demonstration_may_be_its_own_guide():
  tokenizer = OneCharacterEach()
  one = trajectory(("prompt", tokenizer.encode("Q")), ("policy", tokenizer.encode("yes")))
  found = guide.guided(
    one,
    GuideSettings(before="[", after="]"),
    write=lambda question: f"{question}!",
    encode=tokenizer.encode,
    decode=tokenizer.decode,
    eos_id=tokenizer.eos_id,
  )
  assert tokenizer.decode(found.segments[0].token_ids) == "Who?[yes]!"
  assert found.segments[1:] == one.segments[1:]


def config_of(**changes):
  config = search_e1_config.get_config("tiny")
  config.update_from_flattened_dict(changes)
  return config


CHANGES = {
  "distillation.divergence": "reverse",
  "distillation.jensen_shannon_beta": 0.3,
  "distillation.top_k": 5,
  "distillation.clip_form": "scaled",
  "distillation.clip": 0.2,
  "distillation.temperature": 1.1,
  "distillation.teacher": "ema",
  "distillation.teacher_decay": 0.5,
  "distillation.row_length": 512,
}


@pytest.mark.parametrize("field", CHANGES)
def test_what_a_teacher_is_reaches_the_step(field, monkeypatch):
  """The settings as they stand in the config are those that the traced step computes with."""
  seen = []
  stages_of = lambda config: build.assemble(
    config, build.mesh_of(config), build.model_config(config)
  )

  def spy(*args, settings, **how):
    seen.append((settings, args[3].shape[1]))
    raise Traced

  stage_parts.shared_update.cache_clear()  # what was traced before would not be traced again
  monkeypatch.setattr(divergence, "token_divergence", spy)
  monkeypatch.setattr(update, "_follow", lambda teacher, state: seen.append(teacher) or state)
  config = config_of(**{field: CHANGES[field]})
  plan = compiled.Plan(stages_of(config), None, 100.0, stages_of(config).stages[2])
  with pytest.raises(Traced):
    plan.parts.learn.lower(compiled.state_of(plan), compiled.batch_of(plan))
  teacher = plan.parts.stage.algorithm.teacher
  (between, _) = seen[0]
  section, name = field.split(".")
  where = {"teacher": teacher.weights, "teacher_decay": teacher.decay, "row_length": None}
  if name == "row_length":
    assert plan.packing.teacher_length == 512
  else:
    assert (where[name] if name in where else getattr(between, name)) == CHANGES[field]


class Traced(Exception):
  pass


def test_stages_alternate_and_what_does_not_come_out_even_is_refused():
  config = config_of(**{"num_steps": 30, "search_e1.distillation_steps": 5, "search_e1.cycles": 2})
  made = build.assemble(config, build.mesh_of(config), build.model_config(config))
  assert [(p.stage.name, p.stage.num_steps, p.first) for p in made.stages[1:]] == [
    ("reinforcement_1", 10, 0),
    ("distillation_1", 5, 10),
    ("reinforcement_2", 10, 15),
    ("distillation_2", 5, 25),
  ]
  for changes, sentence in (
    ({"num_steps": 31}, r"num_steps=31 does not make search_e1\.cycles=2 equal cycles"),
    ({"search_e1.distillation_steps": 16}, r"search_e1\.distillation_steps=16 in each"),
    ({"distillation.rank": 4}, r"distillation\.optimizer='muon' .*distillation\.optimizer=adamw"),
    (
      {"distillation.rank": 100_000, "distillation.optimizer": "adamw"},
      r"distillation\.rank=100000 must be below",
    ),
    (
      {"distillation.teacher": "ema", "distillation.rank": 4, "distillation.optimizer": "adamw"},
      r"frozen weights can't follow",
    ),
    ({"distillation.teacher": "ema", "policy.dtype": "bfloat16"}, r"lose small moves"),
  ):
    config = config_of(**{"num_steps": 30, "search_e1.distillation_steps": 5} | changes)
    with pytest.raises(ValueError, match=sentence):
      build.assemble(config, build.mesh_of(config), build.model_config(config))


def test_a_moving_average_follows_the_policy_and_a_frozen_teacher_stays(mesh):
  groups = students(5)
  batch = batch_of(groups, guided_prompts(groups), distillation())
  averaged = distillation(teacher="ema", teacher_decay=0.75, rank=0)
  before, state, _ = learn(mesh, averaged, batch)
  for name, old in before.items():
    expected = 0.75 * old + 0.25 * state.params[name]
    np.testing.assert_allclose(state.reference[name], expected, atol=1e-6)
  assert any((state.params[name] != old).any() for name, old in before.items())
  _, state, _ = learn(mesh, distillation(), batch)
  for name, old in before.items():
    np.testing.assert_array_equal(state.reference[name], old)


def test_a_later_reinforcement_may_keep_the_optimizer_and_the_first_reference():
  fields = lambda **changes: make(
    "search_e1", lambda cls: cls(**changes if cls is search_e1.SearchE1Settings else {}), FACTS
  ).stages(600)
  assert [(s.optimizer_of, s.reference_of) for s in fields()] == [(None, None)] * 4
  kept = fields(optimizer="keep", reference="first")
  assert [(s.optimizer_of, s.reference_of) for s in kept] == [
    (None, None),
    (None, None),
    ("reinforcement_1", "reinforcement_1"),
    (None, None),
  ]


def test_pairs_of_the_last_steps_need_steps_enough_and_groups_of_their_size():
  def stages(reinforcement=12, **pairs):
    changes = {PairSettings: {"source": "last_steps", **pairs}}
    facts = FACTS._replace(questions_per_step=8)
    algorithm = make("search_e1", lambda cls: cls(**changes.get(cls, {})), facts)
    return algorithm.stages(2 * (reinforcement + 100))

  reinforcement, distillation = stages(num_questions=33)[:2]
  assert reinforcement.keeps == distillation.algorithm.kept_steps == 5
  with pytest.raises(ValueError, match="of 13 steps, and a cycle has 12"):
    stages(num_questions=97)
  with pytest.raises(ValueError, match=r"samples_per_question=3 .* must be 0 or .*=4"):
    stages(num_questions=8, samples_per_question=3)


def test_rollouts_kept_at_a_step_are_read_back(tmp_path):
  groups = [random_groups(3, 2, seed=seed) for seed in range(3)]
  for step, of_step in enumerate(groups, 4):
    pair_files.keep(tmp_path, step, of_step)
  assert pair_files.kept(tmp_path, 6, 2) == [*groups[1], *groups[2]]
  path = tmp_path / "pairs" / "rollouts" / "step_000005.json.zlib"
  path.write_bytes(path.read_bytes()[:-9])
  with pytest.raises(Unusable, match="rollouts of step 5, .*step_000005"):
    pair_files.kept(tmp_path, 6, 2)
