"""Refuses what can't run, before any work: a sentence naming field, value, rule and way out."""

import pathlib

import jax

from stratified import config as configs
from stratified import files, rewards, sharding, strata
from stratified.algorithms.base import Algorithm, Stage
from stratified.algorithms.search_e1 import Distillation
from stratified.config import read
from stratified.policy import decoder, lora
from stratified.policy.settings import check_platform, PolicySettings
from stratified.retrieval import retrievers
from stratified.rewards import steps as step_rewards
from stratified.runs import convergence, samplers, settings
from stratified.tasks import base, named, search_qa
from stratified.tools.search import Search

###  What does not go together  ###


def check_settings(config) -> None:
  """Checks every field against its rule, and fields against each other; no files, no devices."""
  configs.check_all(config, settings.rules())
  read(PolicySettings, config)
  read(lora.LoraSettings, config)
  check_staleness(config)
  check_rows(config)
  check_updates(config)
  check_likelihood(config)
  convergence.check(config)
  base.limits(config)
  named.check(config)
  strata.check(config.strata.name)
  rewards.of(read(rewards.RewardSettings, config))
  if config.retriever.name == "http":
    retrievers.HttpSettings(config.retriever.url).address
  if config.sampler.name == "sglang":
    samplers.settings(config)


def check_staleness(config) -> None:
  if (
    config.rollout.max_staleness
    and config.loss.old_log_probs == "trainer"
    and not config.loss.importance_cap
  ):
    raise ValueError(
      "rollout.max_staleness=1 trains on the last step's policy: correct for it with "
      "--config.loss.old_log_probs=sampler, or with --config.loss.importance_cap=2"
    )


def check_rows(config) -> None:
  length, chunk = config.packing.row_length, config.policy.logit_chunk
  if length < config.rollout.max_tokens:
    raise ValueError(
      f"packing.row_length={length} must be at least "
      f"rollout.max_tokens={config.rollout.max_tokens}: a rollout fills at most one row"
    )
  if chunk and length % chunk:
    raise ValueError(
      f"policy.logit_chunk={chunk} does not divide packing.row_length={length}; choose a divisor, "
      "or 0 for no chunks"
    )


MOST_UPDATES = 10_000  # of one rollout batch; so a warm-up's updates fit int32 too


def check_updates(config) -> None:
  parts, questions = config.update.mini_batches, config.data.questions_per_step
  if questions % parts:
    raise ValueError(
      f"update.mini_batches={parts} does not divide data.questions_per_step={questions}; choose a "
      "divisor, so that every update sees as many questions"
    )
  updates = config.update.epochs * parts
  if updates > MOST_UPDATES:
    raise ValueError(
      f"update.epochs={config.update.epochs} x update.mini_batches={parts} are {updates} updates "
      f"of one rollout batch; they must be at most {MOST_UPDATES}"
    )


def check_steps(config, stages) -> None:
  """Refuses rewards of single searches where a method has no place for them, or none are read."""
  path = config.reward.documents
  if not path:
    return
  wrong = [s for s in stages if s.source == "rollouts" and not s.algorithm.TAKES_STEPS]
  if wrong:
    raise ValueError(
      f"reward.documents={path!r} rewards single searches, for which algorithm.name="
      f"{config.algorithm.name!r} has no place; set --config.algorithm.name=ppo, or leave it out"
    )
  step_rewards.read_documents(path)


def check_likelihood(config) -> None:
  several = config.update.epochs * config.update.mini_batches > 1
  if config.likelihood.coefficient and not several and config.loss.old_log_probs == "trainer":
    raise ValueError(
      f"likelihood.coefficient={config.likelihood.coefficient} does nothing with one update a "
      "batch, in which no likelihood is lost yet; set --config.update.mini_batches=2 or "
      "--config.update.epochs=2, or leave it at 0"
    )


# Of a method's own stages; the warm start's are demonstrations.
SOURCES = ("rollouts", "pairs", "examples")


def checked_stages(config, method: Algorithm) -> tuple[Stage, ...]:
  """Returns the method's stages; refuses those that the trainer can't run one after the other."""
  name = f"algorithm.name={config.algorithm.name!r}"
  try:
    found = method.stages(config.num_steps)
  except Exception as error:
    if ":" not in config.algorithm.name:  # our own speak of their settings
      raise
    text = " ".join(str(error).split())[:200]
    raise ValueError(f"{name} failed in stages with {type(error).__name__}: {text}") from error
  if (
    not isinstance(found, list | tuple)
    or not found
    or not all(isinstance(stage, Stage) for stage in found)
  ):
    raise ValueError(f"{name} has the stages {found!r}; it must give one Stage at least")
  for stage in found:
    if stage.source not in SOURCES:
      raise ValueError(
        f"{name} has a stage {stage.name!r} with the source {stage.source!r}; choose one of "
        f"{', '.join(SOURCES)}"
      )
    if stage.source == "pairs" and not isinstance(stage.algorithm, Distillation):
      raise ValueError(
        f"{name} has a stage {stage.name!r} on pairs with {type(stage.algorithm).__name__}; such a "
        "stage needs a Distillation (stratified/algorithms/search_e1.py)"
      )
  names = [stage.name for stage in found]
  for number, stage in enumerate(found):
    for part in ("optimizer_of", "reference_of"):
      other = getattr(stage, part)
      if other is not None and other not in names[:number]:
        raise ValueError(
          f"{name} has a stage {stage.name!r} with {part}={other!r}; name one of the stages before "
          f"it: {', '.join(names[:number]) or 'it is the first'}"
        )
  if len({*names, "warm_start"}) <= len(names):
    raise ValueError(f"{name} has stages called {', '.join(names)}; each needs a name of its own")
  steps = [stage.num_steps for stage in found]
  if min(steps) < 1 or sum(steps) != config.num_steps:
    raise ValueError(
      f"{name} has stages of {', '.join(map(str, steps))} steps; each needs one at least, and they "
      f"must add up to num_steps={config.num_steps}"
    )
  convergence.check_kept(config, found)
  return tuple(found)


def check_teacher(config, model, adapters, teacher) -> None:
  """Refuses what a distillation can't train, or its teacher can't be."""
  check_adapter(config, model, adapters, config.distillation.optimizer, "distillation")
  if teacher and teacher.weights == "ema" and config.policy.dtype != "float32":
    raise ValueError(
      f"distillation.teacher='ema' with policy.dtype={config.policy.dtype!r}: a moving average "
      "kept in it would lose small moves; set --config.policy.dtype=float32, or a frozen teacher"
    )


def check_protocol(config) -> None:
  if config.rollout.protocol == "tool_calls" and not config.policy.checkpoint:
    raise ValueError(
      "rollout.protocol='tool_calls' needs policy.checkpoint: the calls' form comes with a model's "
      "chat template"
    )
  if config.rollout.chat_template and not config.policy.checkpoint:
    raise ValueError(
      "rollout.chat_template=True needs policy.checkpoint: the template comes with a model's "
      "directory"
    )
  if named.name_of(config) == "search_qa":
    base.protocol(config, (Search,))


def check_warm_start(config) -> None:
  steps = config.warm_start.num_steps
  imitates = config.algorithm.name == "sft" and config.sft.targets == "demonstrations"
  if not steps and not imitates:
    return
  asked = f"warm_start.num_steps={steps}" if steps else "sft.targets='demonstrations'"
  if named.name_of(config) == "search_qa":
    raise ValueError(
      f"{asked} {'must be 0' if steps else 'has nothing to imitate'} with data.name='files': "
      "demonstrations are scripted for the generated tasks alone"
    )
  if _scripted(config):
    return
  if config.rollout.protocol != "short":
    raise ValueError(
      f"rollout.protocol={config.rollout.protocol!r} must be 'short' with {asked}: the "
      "demonstrations are scripted in its tags; the methods of "
      "configs/baselines.py that learn nothing need a preset with weights, such as smollm2"
    )


def _scripted(config) -> bool:
  """Whether the demonstrations are written in the short wording of a published protocol."""
  name = config.rollout.protocol
  if not name.endswith("_short") or named.name_of(config) != "encyclopedia":
    return False
  if name == "r1_short" and config.rollout.max_turns:
    raise ValueError(
      f"rollout.max_turns={config.rollout.max_turns} must be 0 with rollout.protocol='r1_short' "
      "and demonstrations, in which nobody searches; set --config.rollout.max_turns=0 and "
      "--config.warm_start.mixture=1,"
    )
  return True


def check_devices(config) -> None:
  check_platform(read(PolicySettings, config), jax.default_backend())
  if config.sampler.devices > len(jax.local_devices()):
    raise ValueError(
      f"sampler.devices={config.sampler.devices} is more than the {len(jax.local_devices())} "
      "devices of this process; 0 takes all of them"
    )


def check_split(config, mesh, model: decoder.DecoderConfig, rows: int) -> None:
  """Refuses sizes that the mesh can't split."""
  demonstrated = config.warm_start.demonstrations_per_step if config.warm_start.num_steps else 0
  where = "the policy.checkpoint's " if config.policy.checkpoint else "policy."
  sharding.check_divisible(
    mesh,
    {
      "warm_start.demonstrations_per_step": ("question", demonstrated),
      "data.questions_per_step": ("question", config.data.questions_per_step),
      "packing.rows": ("row", rows),
      f"{where}num_heads": ("heads", model.num_heads),
      f"{where}num_kv_heads": ("kv_heads", model.num_kv_heads),
      f"{where}mlp_width": ("mlp", model.mlp_width),
      "the tokenizer's vocabulary": ("vocabulary_part", model.vocab_size),
      f"{where}width": ("width", model.width),
    },
  )


def check_adapter(config, model: decoder.DecoderConfig, chosen, optimizer: str, at: str) -> None:
  """Refuses adapters that can't be trained; `at` is the section that names their rank."""
  if chosen is None:
    return
  try:
    lora.weights(model, chosen)
  except ValueError as error:
    raise ValueError(str(error).replace("lora.", f"{at}.")) from error
  if config.memory.reference == "host":
    raise ValueError(
      f"memory.reference='host' must be 'device' with {at}.rank={chosen.rank}: the reference is "
      "the frozen weights, which every pass computes with"
    )
  if optimizer == "muon":
    section = "optimizer.name" if at == "lora" else f"{at}.optimizer"
    raise ValueError(
      f"{section}='muon' makes every singular value of an update alike, which the two thin "
      f"factors of {at}.rank={chosen.rank} have no use for; train adapters with "
      f"--config.{section}=adamw"
    )


###  What is not here  ###


def missing_parts(config) -> list[str]:
  """Lists what the run needs and does not find, one sentence each with the command that gets it."""
  found = _missing_files(config) if named.name_of(config) == "search_qa" else []
  return found + retrievers.missing(config)


def check_missing(parts: list[str]) -> None:
  """Raises FileNotFoundError for what is missing, all of it at once."""
  if len(parts) == 1:
    raise FileNotFoundError(parts[0])
  if parts:
    raise FileNotFoundError(
      f"{len(parts)} parts of this run are missing:\n" + "\n".join(f"  {part}" for part in parts)
    )


def _missing_files(config) -> list[str]:
  # A server, or a dense index, has its passages elsewhere.
  names = (
    ["questions"]
    + ["evaluation"] * bool(config.data.evaluation)
    + ["corpus"] * (config.retriever.name in ("bm25", "hybrid"))
  )
  found = _missing_model(config)
  for name in names:
    try:
      exists = search_qa.path_of(config.data[name]).exists()
    except FileNotFoundError as error:  # STRATIFIED_DATA, or a name at all, is missing
      found.append(f"{error}")
      continue
    if not exists:
      found.append(
        f"data.{name}={config.data[name]!r} does not exist; "
        f"name the file with --config.data.{name}=PATH or make it with "
        "python experiments/prepare_data.py --download=all --remove_duplicates"
      )
  return list(dict.fromkeys(found))


def _missing_model(config) -> list[str]:
  checkpoint = config.policy.checkpoint
  if not checkpoint:
    raise ValueError(
      "policy.checkpoint is empty: data from files needs a model directory, "
      "e.g. --config.policy.checkpoint=.cache/models/smollm2-135m-instruct"
    )
  stored = pathlib.Path(checkpoint) / "config.json"
  if not stored.exists():
    fetch = (
      "python third_party/smollm2/fetch.py"
      if "smollm2" in checkpoint
      else f"hf download Qwen/{pathlib.Path(checkpoint).name} --local-dir {checkpoint}"
      if pathlib.Path(checkpoint).name.startswith("Qwen")
      else "download the model there, or name its directory with --config.policy.checkpoint"
    )
    return [f"policy.checkpoint={checkpoint!r} holds no model (no config.json); to get it: {fetch}"]
  most = files.read_object(stored).get("max_position_embeddings")
  if isinstance(most, int) and config.rollout.max_tokens > most:
    raise ValueError(
      f"rollout.max_tokens={config.rollout.max_tokens} is more than the {most} positions that the "
      f"model of policy.checkpoint={checkpoint!r} was made for; lower it"
    )
  return []
