"""The sections policy, lora and optimizer: rules, and the parts that are made of them."""

import dataclasses

import pytest

from stratified import config as settings_of
from stratified.learner.optimizer import make, OptimizerSettings
from stratified.policy import decoder
from stratified.policy.lora import LoraConfig, LoraSettings
from stratified.policy.settings import check_platform, decoder_config, PolicySettings

CLASSES = PolicySettings, LoraSettings, OptimizerSettings


def test_a_config_of_the_defaults_reads_back_as_them():
  config = settings_of.to_config(*CLASSES)
  for cls in CLASSES:
    assert settings_of.read(cls, config) == cls()
  config.policy.width, config.lora.rank, config.optimizer.b2 = 64, 4, 0.5
  assert settings_of.read(PolicySettings, config).width == 64
  assert settings_of.read(LoraSettings, config).adapter().rank == 4
  assert settings_of.read(OptimizerSettings, config).b2 == 0.5


def test_the_decoder_has_the_settings_sizes_and_the_tokenizers_vocabulary():
  settings = PolicySettings(width=24, num_heads=3, num_kv_heads=1, dtype="bfloat16", unroll=2)
  found = decoder_config(settings, vocab_size=50, platform="cpu", row_length=64)
  assert found == decoder.DecoderConfig(
    vocab_size=50,
    width=24,
    num_layers=4,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=384,
    rope_theta=100.0,
    dtype="bfloat16",
    attention="folded",
    unroll=2,
  )
  named = dataclasses.replace(settings, attention="library")
  assert decoder_config(named, vocab_size=50, platform="tpu", row_length=64).attention == "library"


def test_adapters_are_made_of_the_settings():
  assert LoraSettings().adapter() is None
  assert LoraSettings(rank=2, alpha=4.0, targets="q,up").adapter() == LoraConfig(
    2, 4.0, ("q", "up")
  )
  assert LoraSettings(rank=2).adapter() == LoraConfig(2, 128.0)


def test_an_optimizer_is_made_of_the_settings():
  make(**dataclasses.asdict(OptimizerSettings()))


@pytest.mark.parametrize(
  "cls, changes, sentence",
  [
    (PolicySettings, dict(dtype="float16"), "policy.dtype='float16' is unknown; choose one of"),
    (
      PolicySettings,
      dict(remat="some"),
      "policy.remat='some' is unknown; choose one of dots, full, none",
    ),
    (PolicySettings, dict(attention="fast"), "policy.attention='fast' .* auto, cudnn, folded"),
    (PolicySettings, dict(unroll=0), "policy.unroll=0 must be at least 1"),
    (PolicySettings, dict(logit_chunk=-1), "policy.logit_chunk=-1 must be at least 0"),
    (PolicySettings, dict(width=0), "policy.width=0 must be at least 1"),
    (PolicySettings, dict(rope_theta=0.0), "policy.rope_theta=0.0 must be at least 1"),
    (PolicySettings, dict(width=20), "policy.width=20 must be an even multiple of .*num_heads=4"),
    (PolicySettings, dict(num_kv_heads=3), "num_heads=4 must be a multiple of .*num_kv_heads=3"),
    (PolicySettings, dict(look_back=(1, -1)), "policy.look_back=.*-1.* must be whole numbers"),
    (LoraSettings, dict(rank=-1), "lora.rank=-1 must be at least 0"),
    (LoraSettings, dict(alpha=0.0), "lora.alpha=0.0 must be above 0"),
    (LoraSettings, dict(rank=1, targets="q,embed"), "lora.targets='q,embed' must name each layer"),
    (OptimizerSettings, dict(name="adamax"), "optimizer.name='adamax' is unknown; .* muon"),
    (OptimizerSettings, dict(learning_rate=0.0), "optimizer.learning_rate=0.0 must be above 0"),
    (OptimizerSettings, dict(b2=1.0), "optimizer.b2=1.0 must be at least 0 and at most 0.999999"),
  ],
)
def test_what_breaks_a_rule_is_refused_by_name(cls, changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    cls(**changes)


def test_sizes_are_not_looked_at_where_a_checkpoint_gives_them():
  PolicySettings(checkpoint="some/model", width=20, num_kv_heads=3)


def test_what_a_field_affects():
  """How a pass is computed changes no evaluated answer; an optimizer changes the training alone."""
  affects = {name: set(rule.affects) for name, rule in settings_of.rules(*CLASSES).items()}
  for name in ("remat", "unroll", "attention", "logit_chunk"):
    assert affects[f"policy.{name}"] == {"training", "warm_start"}
  for name in ("checkpoint", "dtype", "width", "rope_theta"):
    assert affects[f"policy.{name}"] == {"training", "warm_start", "answers"}
  assert affects["lora.rank"] == {"training", "answers"}
  assert affects["optimizer.b1"] == {"training"}
  assert affects["optimizer.clip_norm"] == {"training", "warm_start"}


def test_an_attention_of_another_platform_is_refused():
  check_platform(PolicySettings(attention="splash"), "tpu")
  with pytest.raises(ValueError, match="policy.attention='splash' runs on a TPU alone, and .* CPU"):
    check_platform(PolicySettings(attention="splash"), "cpu")
