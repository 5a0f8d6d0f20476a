"""From a config to the parts of a run: the one place that knows both ml_collections and the library.

Everything that can be refused is refused by `check`, before any work is done.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

from stratified import advantages, batching, losses, metrics, optimizer as optimizers, sharding, strata, update
from stratified.data import demonstrations, encyclopedia, questions as generated, readers, tokenizer as tokenizers
from stratified.policy import decoder, hugging_face
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.corpus import read_corpus
from stratified.rollout import loop, tags
from stratified.rollout.jax_sampler import JaxSampler, SamplerConfig
from stratified.rollout.limits import Limits
from stratified.types import Question

# How far beyond the run's seed the seeds of the other encyclopedias lie: the one that training never sees, and those
# that the warm start practises in.
SECOND_SEED, PRACTICE_SEED = 1_000_003, 2_000_003


@dataclasses.dataclass(frozen=True)
class World:
  """What the agent acts in: questions by step, held-out sets by name, search, and how text becomes tokens."""

  tokenizer: tokenizers.Tokenizer
  protocol: tags.SearchTags
  limits: Limits
  retriever: Any
  questions_at: Callable[[int], list[Question]]
  held_out: Callable[[int], dict[str, tuple[list[Question], Any]]]  # count -> name -> (questions, retriever)


class Timed:
  """A retriever that counts the seconds and queries of its searches."""

  def __init__(self, retriever):
    self._retriever, self.seconds, self.queries = retriever, 0.0, 0

  def search(self, queries, topk):
    start = time.perf_counter()
    try:
      return self._retriever.search(queries, topk)
    finally:
      self.seconds += time.perf_counter() - start
      self.queries += len(queries)


def check(config) -> None:
  """Refuses, in one sentence each, what can't run: before anything is loaded, written or compiled."""
  _one_of("data.name", config.data.name, ("encyclopedia", "files"))
  _one_of("sampler.name", config.sampler.name, ("jax",))
  _one_of("retriever.name", config.retriever.name, ("bm25",))
  _one_of("rollout.protocol", config.rollout.protocol, PROTOCOLS)
  _one_of("loss.kl_estimator", config.loss.kl_estimator, losses.KL_ESTIMATORS)
  _one_of("loss.aggregation", config.loss.aggregation, losses.AGGREGATIONS)
  _one_of("loss.old_log_probs", config.loss.old_log_probs, ("trainer", "sampler"))
  _one_of("policy.dtype", config.policy.dtype, ("float32", "bfloat16"))
  _one_of("policy.attention", config.policy.attention, ("auto", "library", "folded"))
  _check_ranges(config)
  if config.rollout.max_staleness or config.lora.rank:
    raise ValueError("rollout.max_staleness and lora.rank must be 0: this version trains on-policy, all parameters")
  if config.packing.row_length < config.rollout.max_tokens:
    raise ValueError(f"packing.row_length={config.packing.row_length} must be at least "
                     f"rollout.max_tokens={config.rollout.max_tokens}: a rollout fills at most one row")
  advantages.validate(config.advantage.name, config.rollout.samples_per_question, _advantage_options(config))
  partition(config)
  limits(config)
  optimizer(config)
  if config.data.name == "files":
    if config.warm_start.num_steps:
      raise ValueError(f"warm_start.num_steps={config.warm_start.num_steps} must be 0 with data.name='files': "
                       "demonstrations are scripted for the generated encyclopedia alone")
    _check_files(config)
  else:
    _encyclopedia_settings(config.data)
  if config.warm_start.num_steps:
    demonstration_config(config)
    optimizer(config, warm_start=True)
  mesh = mesh_of(config)
  sharding.check_divisible(mesh, {
      "data.questions_per_step": ("question", config.data.questions_per_step),
      "packing.rows": ("row", config.packing.rows)})
  model = model_config(config)
  sharding.check_divisible(mesh, {
      "num_heads": ("heads", model.num_heads), "num_kv_heads": ("kv_heads", model.num_kv_heads),
      "mlp_width": ("mlp", model.mlp_width), "vocab_size": ("vocabulary", model.vocab_size),
      "width": ("width", model.width)})


# field -> (least, most, what holds beside it); a field is checked where the config has it.
_ANY, _TINY = math.inf, 1e-12
RANGES = {
    "seed": (0, 2**31 - 1), "num_steps": (1, _ANY), "data.questions_per_step": (1, _ANY),
    "rollout.samples_per_question": (1, _ANY), "rollout.temperature": (_TINY, _ANY), "rollout.top_p": (_TINY, 1),
    "sampler.lanes": (1, _ANY), "sampler.block": (1, _ANY), "sampler.rows": (1, _ANY),
    "warm_start.num_steps": (0, _ANY), "warm_start.demonstrations_per_step": (1, _ANY),
    "warm_start.encyclopedias": (1, _ANY), "warm_start.context_weight": (0, _ANY),
    "packing.rows": (1, _ANY), "packing.row_length": (2, _ANY),
    "loss.kl_coefficient": (0, _ANY), "loss.clip_ratio": (0, _ANY), "loss.importance_cap": (0, _ANY),
    "optimizer.b1": (0, 1 - _TINY), "optimizer.b2": (0, 1 - _TINY),
    "policy.width": (1, _ANY), "policy.num_layers": (1, _ANY), "policy.num_heads": (1, _ANY),
    "policy.num_kv_heads": (1, _ANY), "policy.mlp_width": (1, _ANY), "policy.rope_theta": (_TINY, _ANY),
    "policy.unroll": (1, _ANY), "policy.logit_chunk": (0, _ANY),
    "eval.questions": (1, _ANY), "eval.every": (0, _ANY), "checkpoint.every": (1, _ANY),
    "logging.trajectories_every": (0, _ANY),
}


def _check_ranges(config):
  values = metrics.flatten(config.to_dict())
  for name, (least, most) in RANGES.items():
    value = values.get(name, least)
    if not (least <= value <= most and math.isfinite(value)):
      low = "above 0" if least == _TINY else f"at least {least}"
      high = "" if most == _ANY else " and below 1" if most == 1 - _TINY else f" and at most {most}"
      raise ValueError(f"{name}={value} must be {low}{high}, and finite")
  width, heads = values.get("policy.width", 0), values.get("policy.num_heads", 1)
  if width % heads or (width // heads) % 2:
    raise ValueError(f"policy.width={width} must be an even multiple of policy.num_heads={heads}: "
                     "each head takes an equal part, of which rotary positions turn pairs")


def _one_of(name, value, choices):
  if value not in choices:
    raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(sorted(choices))}")


def _check_files(config):
  if not config.policy.checkpoint:
    raise ValueError("policy.checkpoint is empty: data from files needs a model directory, "
                     "e.g. --config.policy.checkpoint=.cache/models/smollm2-135m-instruct")
  fetch = "python third_party/smollm2/fetch.py" if "smollm2" in config.policy.checkpoint else (
      "download the model there, or name its directory with --config.policy.checkpoint")
  if not (pathlib.Path(config.policy.checkpoint) / "config.json").exists():
    raise FileNotFoundError(f"policy.checkpoint={config.policy.checkpoint!r} holds no model (no config.json); "
                            f"to get it: {fetch}")
  for name in ("questions", "corpus"):
    if not path_of(config.data[name]).exists():
      raise FileNotFoundError(f"data.{name}={config.data[name]!r} does not exist; "
                              f"name the file with --config.data.{name}=PATH")


def path_of(value: str) -> pathlib.Path:
  """A path from the config; `$STRATIFIED_DATA` in front of it is the folder of real data."""
  if value.startswith("$STRATIFIED_DATA"):
    return readers.data_root() / value.removeprefix("$STRATIFIED_DATA").lstrip("/")
  if not value:
    raise FileNotFoundError("data.questions and data.corpus must name files for data.name='files'; "
                            "give --config.data.questions=PATH --config.data.corpus=PATH")
  return pathlib.Path(os.path.expanduser(value))


def _advantage_options(config) -> dict[str, Any]:
  return {name: value for name, value in config.advantage.to_dict().items() if name != "name" and value is not None}


def partition(config) -> strata.Partition:
  return strata.make(config.strata.name, cap=config.strata.cap, seed=config.seed)


def limits(config, **changes) -> Limits:
  names = ("max_turns", "max_turn_tokens", "max_observation_tokens", "max_tokens", "answer_tokens", "topk")
  return Limits(**{name: config.rollout[name] for name in names} | changes)


def mesh_of(config):
  return sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)


def optimizer(config, *, warm_start: bool = False):
  """The optimizer of reinforcement learning, or that of the warm start (its own rate, with a cosine decay)."""
  o, w = config.optimizer, config.warm_start
  if warm_start:
    return optimizers.make(name=w.optimizer, learning_rate=w.learning_rate, warmup_steps=max(1, w.num_steps // 20), decay_steps=w.num_steps,
                           weight_decay=w.weight_decay, clip_norm=o.clip_norm, b1=0.9, b2=0.98)
  return optimizers.make(
      name=o.name, learning_rate=o.learning_rate, warmup_steps=o.warmup_steps,
      weight_decay=o.weight_decay, clip_norm=o.clip_norm, b1=o.b1, b2=o.b2)


def model_config(config) -> decoder.DecoderConfig:
  p = config.policy
  attention = p.attention
  if attention == "auto":
    attention = "folded" if jax.default_backend() == "cpu" else "library"
  run = dict(dtype=p.dtype, remat=p.remat, attention=attention, unroll=p.unroll)
  if p.checkpoint:
    return hugging_face.load_config(p.checkpoint, **run)
  return decoder.DecoderConfig(
      vocab_size=tokenizers.build().vocab_size, width=p.width, num_layers=p.num_layers, num_heads=p.num_heads,
      num_kv_heads=p.num_kv_heads, head_dim=p.width // p.num_heads, mlp_width=p.mlp_width, rope_theta=p.rope_theta, **run)


def initial_params(config, model: decoder.DecoderConfig, mesh):
  if config.policy.checkpoint:
    axes = decoder.logical_axes(model)
    return hugging_face.load_params(config.policy.checkpoint, model, dtype="float32",
                                    sharding_of=lambda name: sharding.named(mesh, axes[name]))
  return decoder.init(model, jax.random.key(config.seed))


PROTOCOLS = {"short": tags.short, "search_r1": tags.search_r1, "few_shot": tags.few_shot}


def world(config) -> World:
  return (_encyclopedia_world if config.data.name == "encyclopedia" else _file_world)(config)


def _encyclopedia_settings(d) -> encyclopedia.EncyclopediaConfig:
  names = ("entities", "near_duplicates", "distractors", "paraphrases", "common_facts")
  return encyclopedia.EncyclopediaConfig(**{name: d[name] for name in names})


def _encyclopedia_world(config) -> World:
  d = config.data
  settings = _encyclopedia_settings(d)
  first, second = (encyclopedia.make(settings, seed) for seed in (config.seed, config.seed + SECOND_SEED))
  search = Timed(BM25(first.passages))

  def held_out(count):
    ask = lambda book: generated.held_out_questions(book, seed=config.seed, count=count, hop_shares=d.hop_shares)
    return {"held_out": (ask(first), search), "second_encyclopedia": (ask(second), BM25(second.passages))}

  return World(
      tokenizer=tokenizers.build(), protocol=PROTOCOLS[config.rollout.protocol](), limits=limits(config), retriever=search,
      questions_at=lambda step: generated.training_questions(
          first, seed=config.seed, step=step, count=d.questions_per_step, hop_shares=d.hop_shares),
      held_out=held_out)


def _file_world(config) -> World:
  d = config.data
  train = readers.read_questions(path_of(d.questions), split=d.split or None)
  search = Timed(BM25(read_corpus(path_of(d.corpus)), cache_dir=pathlib.Path(".cache/bm25")))

  def held_out(count):
    questions = readers.read_questions(path_of(d.questions), split=d.held_out_split or None)
    # The same questions each time, drawn over all sets: their order is that of step 0 of a fixed seed.
    return {"held_out": (readers.questions_at(questions, seed=0, step=0, count=min(count, len(questions))), search)}

  return World(
      tokenizer=tokenizers.Tokenizer.from_file(str(pathlib.Path(config.policy.checkpoint) / "tokenizer.json")),
      protocol=PROTOCOLS[config.rollout.protocol](), limits=limits(config), retriever=search,
      questions_at=lambda step: readers.questions_at(train, seed=config.seed, step=step, count=d.questions_per_step),
      held_out=held_out)


def sampler(config, model: decoder.DecoderConfig, tokenizer, *, greedy: bool = False) -> JaxSampler:
  s, r = config.sampler, config.rollout
  return JaxSampler(model, SamplerConfig(
      lanes=s.lanes, length=r.max_tokens, block=s.block, rows=s.rows, temperature=0.0 if greedy else r.temperature,
      top_p=1.0 if greedy else r.top_p, seed=config.seed), tokenizer)


def records(world_: World, groups, reward, strata_, advantage_qk) -> list[dict]:
  """The step's rollouts as they go into trajectories/; a lost one has no reward, stratum or advantage."""
  rows = []
  for q, group in enumerate(groups):
    for k, trajectory in enumerate(group):
      lost = trajectory.fault is not None
      rows.append(metrics.trajectory_record(
          trajectory, world_.tokenizer.decode, reward=None if lost else reward[q][k],
          stratum=None if lost else strata_[q][k], advantage=None if lost else float(advantage_qk[q, k])))
  return rows


def packing(config) -> batching.Packing:
  return batching.Packing.for_rollouts(config.data.questions_per_step * config.rollout.samples_per_question,
                                       length=config.packing.row_length, rows=config.packing.rows)


def reinforcement_update(config, mesh, model, optimizer_, num_strata: int):
  l = config.loss
  return update.make_update(
      mesh, model, optimizer_,
      token_loss=update.policy_gradient(
          clip_ratio=l.clip_ratio, kl_coefficient=l.kl_coefficient, kl_estimator=l.kl_estimator,
          old_log_probs=l.old_log_probs, importance_cap=l.importance_cap or None),
      advantage=advantages.make(config.advantage.name, num_strata=num_strata,
                                samples_per_question=config.rollout.samples_per_question, **_advantage_options(config)),
      num_strata=num_strata, eps=config.advantage.eps, aggregation=l.aggregation, max_tokens=config.rollout.max_tokens,
      temperature=config.rollout.temperature, chunk=config.policy.logit_chunk or None)


def demonstration_config(config) -> demonstrations.DemonstrationConfig:
  w = config.warm_start
  return demonstrations.DemonstrationConfig(
      mixture=tuple(w.mixture), max_turns=config.rollout.max_turns, wrong_query=w.wrong_query,
      wrong_relation=w.wrong_relation, invalid=w.invalid)


def demonstration_batches(config, world_: World):
  """step -> Batch of scripted demonstrations, one a question, through the agent loop.

  They are set in practice encyclopedias of their own, taken in turn: the policy learns to search, read and copy, and
  has no page of the world that it is trained and tested in to learn by heart. Common knowledge is the same everywhere.
  """
  w, d = config.warm_start, config.data
  shape = batching.Packing.for_rollouts(
      w.demonstrations_per_step, length=config.packing.row_length, rows=config.packing.rows)
  script_config = demonstration_config(config)

  @functools.cache
  def practice(number: int):
    book = encyclopedia.make(_encyclopedia_settings(d), config.seed + PRACTICE_SEED + number)
    return book, BM25(book.passages), demonstrations.Demonstrator(
        book, world_.tokenizer, seed=config.seed, config=script_config)

  def batch_at(step: int):
    book, search, script = practice(step % w.encyclopedias)
    questions = generated.training_questions(
        book, seed=config.seed, step=step, count=w.demonstrations_per_step, hop_shares=d.hop_shares)
    script.begin(step, questions)
    groups = loop.collect(questions, sampler=script, retriever=search, tokenizer=world_.tokenizer,
                          protocol=world_.protocol, limits=world_.limits, samples_per_question=1, step=step)
    zeros = np.zeros((len(groups), 1), np.int32)
    batch = batching.collate(groups, packing=shape, rewards=zeros, strata=zeros, num_strata=1)
    return batching.weigh_context(batch, w.context_weight)

  return batch_at


def supervised_update(config, mesh, model, optimizer_):
  return update.make_update(mesh, model, optimizer_, token_loss=update.supervised, chunk=config.policy.logit_chunk or None)
