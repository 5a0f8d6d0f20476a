"""Search-R1's task and the settings of Stratified GRPO (arXiv 2510.06214).

    python experiments/train.py --config=configs/search_r1.py:tiny --workdir=runs/tiny

Presets, after the colon: `tiny` (none means this; two CPU cores, a quarter of an hour), `smollm2`
(real weights, real questions), `base` and `instruct` (Qwen2.5-3B as in the paper). Any field can be
given on the command line: `--config.advantage.alpha=0.4`.
"""

import ml_collections
from ml_collections import config_dict

from stratified.config import to_config
from stratified.rewards import RewardSettings
from stratified.tasks.base import TaskSettings, ToolSettings


def get_config(preset: str = "tiny") -> ml_collections.ConfigDict:
  changes = {"tiny": _tiny, "smollm2": _smollm2, "base": _base, "instruct": _instruct}
  if preset not in changes:
    raise ValueError(
      f"preset {preset!r} is unknown; choose one of {sorted(changes)}, as in "
      "configs/search_r1.py:tiny"
    )
  config = _common()
  changes[preset](config)
  return config


def _common() -> ml_collections.ConfigDict:
  """The paper's settings; presets change what they must."""
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.num_steps = 200
  c.update(to_config(TaskSettings, ToolSettings, RewardSettings))

  c.policy = ml_collections.ConfigDict()
  c.policy.checkpoint = (
    ""  # a Hugging Face directory; empty builds the tiny decoder of the sizes below
  )
  c.policy.dtype = "float32"
  c.policy.remat = "none"  # none, dots, full
  c.policy.unroll = 1  # layers per iteration of the scan over layers
  c.policy.attention = (
    "auto"  # library, cudnn, splash, folded; auto takes the fastest for the platform
  )
  c.policy.logit_chunk = 0  # positions of a row whose logits exist at once; 0 is all

  c.data = ml_collections.ConfigDict()
  c.data.name = "files"  # encyclopedia, files
  c.data.questions = ""  # file or folder (FlashRAG JSONL, verl parquet)
  c.data.corpus = ""  # JSONL, plain or .gz
  c.data.split = "train"
  c.data.held_out_split = "dev"
  c.data.evaluation = (
    ""  # file or folder of what is evaluated on; empty takes held_out_split of data.questions
  )
  c.data.questions_per_step = 256

  c.rollout = ml_collections.ConfigDict()
  c.rollout.samples_per_question = 8
  c.rollout.max_turns = 4
  c.rollout.max_turn_tokens = 500
  c.rollout.max_observation_tokens = 500
  c.rollout.max_tokens = 4096
  c.rollout.answer_tokens = 32
  c.rollout.topk = 3
  c.rollout.temperature = 1.0
  c.rollout.top_p = 1.0
  c.rollout.protocol = "search_r1"  # search_r1, few_shot, short; those of configs/baselines.py
  c.rollout.chat_template = False  # the prompt as a user message in the model's own chat template
  c.rollout.max_staleness = 0

  c.sampler = ml_collections.ConfigDict()
  c.sampler.name = "jax"  # jax, sglang
  c.sampler.devices = 1  # of each process; 0 is all of them
  c.sampler.lanes = 64  # rollouts side by side on each device
  c.sampler.block = 16
  c.sampler.rows = 16
  c.sampler.prefill_tokens = 4096  # tokens of one prefill call, padding included
  # Of sampler.name = "sglang": see third_party/sglang/README.md.
  c.sampler.urls = ""  # http://HOST:PORT of each server, with commas between them
  c.sampler.sync = "disk"  # disk, tensor, group: how weights get there
  c.sampler.directory = ""  # of disk: a folder that the servers see; empty is tmpfs
  c.sampler.in_flight = 64  # generations a server is given at once
  c.sampler.timeout_s = 600.0  # of one attempt of a generation
  c.sampler.retries = 4
  c.sampler.start_s = 120.0  # until every server must have answered first
  c.sampler.outage_s = 120.0  # how long none may be usable
  c.sampler.health_s = 15.0
  c.sampler.update_s = 600.0
  c.sampler.probe_tolerance = (
    0.0  # largest difference of a log-prob; 0 is 1e-3 in float32, 0.1 in bfloat16
  )
  c.sampler.helper_python = ".venv-sglang/bin/python"  # of group
  c.sampler.group_backend = "gloo"  # gloo, nccl
  c.sampler.group_address = "127.0.0.1"
  c.sampler.release = False  # free the device of the sampler's weights and caches during updates

  c.retriever = ml_collections.ConfigDict()
  c.retriever.name = "bm25"  # bm25, dense, hybrid, http
  c.retriever.index = ""  # dense, hybrid: a folder that experiments/build_index.py made
  c.retriever.encoder = ""  # its model directory, where it is not the index's own
  # http: experiments/serve_retriever.py, or any server of Search-R1's form
  c.retriever.url = "http://127.0.0.1:8000"
  c.retriever.corpus = (
    ""  # http, dense, hybrid: digest that the manifest must have; empty takes any
  )
  c.retriever.timeout_s = 30.0  # of one request
  c.retriever.retries = (
    4  # attempts after the first, before a search is lost and its rollout masked
  )
  c.retriever.give_up_s = 300.0  # without a usable reply; then the run stops
  c.retriever.queries_per_request = 64
  c.retriever.in_flight = 16  # requests at the same time
  c.retriever.cache = 10_000  # queries whose passages are remembered; 0 is none

  c.advantage = ml_collections.ConfigDict()
  c.advantage.name = "blend"
  c.advantage.alpha = 0.6
  c.advantage.eps = 1e-6
  c.advantage.ddof = 0
  # Options of single estimators; None leaves the estimator's own default.
  c.advantage.alpha_end = config_dict.placeholder(
    float
  )  # blend: alpha moves to this over alpha_steps
  c.advantage.alpha_steps = config_dict.placeholder(int)
  c.advantage.kappa = config_dict.placeholder(
    float
  )  # blend, shrunk, san: weight n_k / (n_k + kappa)
  c.advantage.lam = config_dict.placeholder(float)  # two_term: weight of the part between strata
  c.advantage.over = config_dict.placeholder(str)  # question, batch
  c.advantage.fallback = config_dict.placeholder(str)  # san: zero, gn, shrink
  c.advantage.fallback_on = config_dict.placeholder(str)  # san: singleton, constant
  c.advantage.match_rms = config_dict.placeholder(str)  # question, batch: GN's root mean square

  c.strata = ml_collections.ConfigDict()
  c.strata.name = "searches"
  c.strata.cap = 4

  c.loss = ml_collections.ConfigDict()
  c.loss.clip_ratio = 0.2
  c.loss.kl_coefficient = 0.001
  c.loss.kl_estimator = "k3"  # k1, k2, k3
  c.loss.aggregation = "token_mean"  # token_mean, sequence_mean, constant
  c.loss.old_log_probs = "trainer"  # trainer, sampler
  c.loss.importance = "token"  # token, sequence: whose ratio the cap below truncates
  c.loss.importance_cap = 0.0  # truncated importance sampling of the sampler's gap; 0 is off

  c.optimizer = ml_collections.ConfigDict()
  c.optimizer.name = "adamw"
  c.optimizer.learning_rate = 1e-6
  c.optimizer.warmup_steps = 20  # the paper's ratio of 0.1
  c.optimizer.weight_decay = 0.0
  c.optimizer.clip_norm = 1.0
  c.optimizer.b1 = 0.9
  c.optimizer.b2 = 0.999

  c.packing = ml_collections.ConfigDict()
  c.packing.row_length = 4096
  # packed rows of a micro-batch, over all devices; 0 is one for each part that the mesh splits rows
  # into
  c.packing.rows = 0

  c.memory = ml_collections.ConfigDict()
  c.memory.optimizer = "device"  # device, host: where the optimizer's state lies between updates
  c.memory.reference = "device"  # the same for the KL's reference

  c.warm_start = ml_collections.ConfigDict()
  c.warm_start.num_steps = 0

  c.mesh = ml_collections.ConfigDict()
  c.mesh.data = 1
  c.mesh.fsdp = -1
  c.mesh.tensor = 1

  c.lora = ml_collections.ConfigDict()
  c.lora.rank = 0  # 0 trains every weight; above, adapters of that rank beside frozen ones
  c.lora.alpha = 128.0  # an adapter counts alpha / rank
  c.lora.targets = "q,k,v,o,gate,up,down"

  c.eval = ml_collections.ConfigDict()
  c.eval.questions = 400
  c.eval.every = 0  # steps between evaluations during training; 0 is only before and after
  c.eval.forced = False  # also the warm-started policy made to search exactly 0, 1, 2, 3 times

  c.checkpoint = ml_collections.ConfigDict()
  c.checkpoint.every = 10

  c.logging = ml_collections.ConfigDict()
  c.logging.trajectories_every = 1
  return c


def _tiny(c):
  """About a million parameters, built here, on the generated encyclopedia."""
  c.num_steps = 300
  c.policy.width = 128
  c.policy.num_layers = 4
  c.policy.num_heads = 4
  c.policy.num_kv_heads = 2
  c.policy.mlp_width = 384
  c.policy.rope_theta = 100.0
  c.policy.unroll = 4

  c.data.name = "encyclopedia"
  c.data.questions_per_step = 32
  c.data.entities = 2400
  c.data.near_duplicates = 0.2
  c.data.distractors = 0.1
  c.data.paraphrases = 2
  c.data.common_facts = 48
  c.data.hop_shares = (0.2, 0.3, 0.3, 0.2)

  c.rollout.max_turns = 3
  c.rollout.max_turn_tokens = 20
  c.rollout.max_observation_tokens = 64
  c.rollout.max_tokens = 192
  c.rollout.answer_tokens = 10
  c.rollout.topk = 1
  c.rollout.protocol = "short"
  c.sampler.lanes = 64
  c.sampler.block = 4

  c.strata.cap = 3
  c.optimizer.name = "muon"
  c.optimizer.learning_rate = 3e-4
  c.optimizer.warmup_steps = 10
  c.optimizer.b2 = 0.99
  c.packing.row_length = 192
  c.packing.rows = 8

  c.warm_start.num_steps = 2400
  c.warm_start.demonstrations_per_step = 20
  c.warm_start.optimizer = "muon"
  c.warm_start.learning_rate = 2e-3
  c.warm_start.weight_decay = 0.0
  c.warm_start.context_weight = 0.3  # loss weight of the tokens that the script did not write
  c.warm_start.wrong_query = (
    0.02  # rates of the script's mistakes, per search (a turn, for invalid)
  )
  c.warm_start.wrong_relation = 0.02
  c.warm_start.invalid = 0.005
  c.warm_start.encyclopedias = 24  # practice worlds, so that none is learnt by heart
  c.warm_start.mixture = (
    0.15,
    0.2,
    0.25,
    0.4,
  )  # shares of the demonstrations that search 0, 1, 2, 3 times

  c.mesh.fsdp = 1
  c.eval.forced = True
  c.eval.every = 50


def _smollm2(c):
  """SmolLM2-135M-Instruct on real questions; `python third_party/smollm2/fetch.py` brings the
  weights."""
  c.num_steps = 3
  c.policy.checkpoint = ".cache/models/smollm2-135m-instruct"
  c.policy.logit_chunk = 128
  c.policy.remat = "full"
  c.data.questions = "$STRATIFIED_DATA/questions"
  c.data.corpus = "$STRATIFIED_DATA/corpus.jsonl.gz"
  c.data.questions_per_step = 2
  c.rollout.samples_per_question = 4
  c.rollout.max_turns = 2
  c.rollout.max_turn_tokens = 64
  c.rollout.max_observation_tokens = 256
  c.rollout.max_tokens = 1024
  c.rollout.topk = 1
  c.rollout.temperature = 0.6
  c.rollout.protocol = "few_shot"
  c.sampler.lanes = 8
  c.sampler.rows = 4
  c.strata.cap = 2
  c.packing.row_length = 1024
  c.packing.rows = 1
  c.mesh.fsdp = 1
  c.eval.questions = 8
  c.checkpoint.every = 1


def _base(c):
  """Qwen2.5-3B base with the paper's settings: 8 GPUs or a TPU slice."""
  c.policy.checkpoint = "checkpoints/Qwen2.5-3B"
  c.policy.dtype = "bfloat16"
  c.policy.remat = "full"
  c.policy.logit_chunk = 512
  c.sampler.devices = 0
  c.sampler.lanes = 16
  c.sampler.prefill_tokens = 2048
  c.sampler.release = True
  c.data.questions = "data/nq_hotpotqa_train"
  c.data.corpus = "data/wiki18.jsonl"
  c.data.evaluation = "data/benchmarks"


def _instruct(c):
  """Qwen2.5-3B-Instruct: alpha 0.8."""
  _base(c)
  c.policy.checkpoint = "checkpoints/Qwen2.5-3B-Instruct"
  c.rollout.chat_template = True
  c.advantage.alpha = 0.8


def sweep_alpha(add):
  """From GRPO's estimator (0) to SAN (1)."""
  for alpha in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
    add(**{"advantage.name": "blend", "advantage.alpha": alpha})


def sweep_estimators(add):
  for name in (
    "gn",
    "san",
    "blend",
    "stratified",
    "centered",
    "loo",
    "stratified_loo",
    "shrunk",
    "two_term",
    "dr_grpo",
    "san_rms",
  ):
    add(**{"advantage.name": name})


def sweep_strata(add):
  """`random` has the sizes of `searches` and no meaning: the control."""
  for name in ("searches", "random", "first_search", "outcome", "searches*outcome", "answered"):
    add(**{"strata.name": name})


def sweep_seeds(add):
  for seed in range(5):
    add(seed=seed)
