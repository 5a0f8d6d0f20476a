"""From a config to the parts of a run: mesh, model, sampler, estimator, optimizer, update."""

import dataclasses
from typing import Any

import jax

from stratified import advantages, sharding, strata
from stratified.learner import batching, update
from stratified.learner import optimizer as optimizers
from stratified.policy import attention, decoder, lora
from stratified.policy.files import hugging_face
from stratified.sampling.in_process import JaxSampler, SamplerConfig
from stratified.tasks import named


def mesh_of(config):
  return sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)


def model_config(config, *, platform: str | None = None) -> decoder.DecoderConfig:
  """The decoder of a run. `platform` ("cpu", "gpu", "tpu") picks the attention where that is left
  open; None asks jax."""
  p = config.policy
  run = dict(dtype=p.dtype, remat=p.remat, unroll=p.unroll)
  if p.checkpoint:
    model = hugging_face.load_config(p.checkpoint, **run)
  else:
    model = decoder.DecoderConfig(
      vocab_size=named.tokenizer(config).vocab_size,
      width=p.width,
      num_layers=p.num_layers,
      num_heads=p.num_heads,
      num_kv_heads=p.num_kv_heads,
      head_dim=p.width // p.num_heads,
      mlp_width=p.mlp_width,
      rope_theta=p.rope_theta,
      **run,
    )
  return with_attention(config, model, platform or jax.default_backend())


def with_attention(config, model: decoder.DecoderConfig, platform: str) -> decoder.DecoderConfig:
  best = attention.best_for(platform, model.dtype, model.head_dim, config.packing.row_length)
  return dataclasses.replace(
    model, attention=best if config.policy.attention == "auto" else config.policy.attention
  )


def adapter(config) -> lora.LoraConfig | None:
  """The adapters that are trained in place of the weights; None where every weight is."""
  c = config.lora
  return lora.LoraConfig(c.rank, c.alpha, tuple(c.targets.split(","))) if c.rank else None


def initial_params(
  config, model: decoder.DecoderConfig, mesh, *, dtype: str | dict[str, str] = "float32"
):
  if config.policy.checkpoint:
    axes = decoder.logical_axes(model)
    return hugging_face.load_params(
      config.policy.checkpoint,
      model,
      dtype=dtype,
      sharding_of=lambda name: sharding.named(mesh, axes[name]),
    )
  return decoder.init(model, jax.random.key(config.seed))


def optimizer(config, *, warm_start: bool = False):
  """The optimizer of reinforcement learning, or that of the warm start (its own rate, with a cosine
  decay)."""
  o, w = config.optimizer, config.warm_start
  if warm_start:
    return optimizers.make(
      name=w.optimizer,
      learning_rate=w.learning_rate,
      warmup_steps=max(1, w.num_steps // 20),
      decay_steps=w.num_steps,
      weight_decay=w.weight_decay,
      clip_norm=o.clip_norm,
      b1=0.9,
      b2=0.98,
    )
  return optimizers.make(
    name=o.name,
    learning_rate=o.learning_rate,
    warmup_steps=o.warmup_steps,
    weight_decay=o.weight_decay,
    clip_norm=o.clip_norm,
    b1=o.b1,
    b2=o.b2,
  )


def sampler_config(config, *, greedy: bool = False) -> SamplerConfig:
  s, r = config.sampler, config.rollout
  return SamplerConfig(
    lanes=s.lanes,
    length=r.max_tokens,
    block=s.block,
    rows=s.rows,
    prefill_tokens=s.prefill_tokens,
    temperature=0.0 if greedy else r.temperature,
    top_p=1.0 if greedy else r.top_p,
    seed=config.seed,
  )


def sampler(config, model: decoder.DecoderConfig, tokenizer, *, greedy: bool = False) -> JaxSampler:
  devices = jax.local_devices()
  return JaxSampler(
    model,
    sampler_config(config, greedy=greedy),
    tokenizer,
    devices[: config.sampler.devices or len(devices)],
  )


def partition(config, tools=None) -> strata.Partition:
  """The partition of `strata`; `tools` are the task's, None where they are not known yet."""
  return strata.make(config.strata.name, cap=config.strata.cap, seed=config.seed, tools=tools)


def advantage_options(config) -> dict[str, Any]:
  return {
    name: value
    for name, value in config.advantage.to_dict().items()
    if name != "name" and value is not None
  }


def check_split(config, mesh, model: decoder.DecoderConfig) -> None:
  """Refuses sizes that the mesh can't split."""
  sharding.check_divisible(
    mesh,
    {
      "data.questions_per_step": ("question", config.data.questions_per_step),
      "packing.rows": ("row", packing(config, mesh).rows),
      "num_heads": ("heads", model.num_heads),
      "num_kv_heads": ("kv_heads", model.num_kv_heads),
      "mlp_width": ("mlp", model.mlp_width),
      "vocab_size": ("vocabulary_part", model.vocab_size),
      "width": ("width", model.width),
    },
  )


def packing(config, mesh, count: int | None = None) -> batching.Packing:
  """The shapes of a step's batch: of `count` rollouts, or of as many as a training step has."""
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  return batching.Packing.for_rollouts(
    count or config.data.questions_per_step * config.rollout.samples_per_question,
    length=config.packing.row_length,
    rows=config.packing.rows or shards,
    shards=shards,
  )


def host_parts(config) -> tuple[str, ...]:
  """The parts of the training state that lie in the host's memory between updates."""
  return tuple(
    part
    for part, where in (
      ("opt_state", config.memory.optimizer),
      ("reference", config.memory.reference),
    )
    if where == "host"
  )


def reinforcement_update(config, mesh, model, optimizer_, num_strata: int):
  l = config.loss
  return update.make_update(
    mesh,
    model,
    optimizer_,
    token_loss=update.policy_gradient(
      clip_ratio=l.clip_ratio,
      kl_coefficient=l.kl_coefficient,
      kl_estimator=l.kl_estimator,
      old_log_probs=l.old_log_probs,
      importance_cap=l.importance_cap or None,
      importance=l.importance,
    ),
    advantage=advantages.make(
      config.advantage.name,
      num_strata=num_strata,
      samples_per_question=config.rollout.samples_per_question,
      **advantage_options(config),
    ),
    num_strata=num_strata,
    eps=config.advantage.eps,
    aggregation=l.aggregation,
    max_tokens=config.rollout.max_tokens,
    temperature=config.rollout.temperature,
    chunk=config.policy.logit_chunk or None,
    adapter=adapter(config),
    host=host_parts(config),
  )


def supervised_update(config, mesh, model, optimizer_):
  return update.make_update(
    mesh, model, optimizer_, token_loss=update.supervised, chunk=config.policy.logit_chunk or None
  )
