"""Measures the in-process sampler against `transformers.generate`: same weights, prompts, lengths.

    python experiments/benchmarks/bench_rollout.py [--model=tiny] [--repeats=5] [--json=FILE]
    python experiments/benchmarks/bench_rollout.py --model=.cache/models/smollm2-135m-instruct

Both sample at temperature 1 in float32 on the same cores, nothing stops early, and every rollout
gets the same number of new tokens. The K samples of a question share their prompt's prefill here;
`num_return_sequences=K` is the nearest that generate offers. The sampler returns log-probs,
generate is not asked for any. Decode alone is what the tokens after the first block add: (new -
block) tokens over the difference of two runs' times, the same way on both sides.
"""

import argparse
import json

import numpy as np

from experiments.benchmarks import paired_timing
from stratified.sampling.in_process import JaxSampler, SamplerConfig
from stratified.sampling.interface import Request

# Defaults that follow the presets: lanes and lengths of `tiny`, of `smollm2`.
SHAPES = {
  "tiny": dict(questions=8, samples=8, prompt=64, new=128),
  "other": dict(questions=2, samples=4, prompt=256, new=64),
}


class NoText:
  """Stands for a tokenizer where nothing stops on text or at an end token."""

  eos_id = -1

  def decode(self, token_ids):
    return ""


def ours(model, params, a, prompts):
  """new tokens -> the sampler's completions, each rollout with its question's prompt."""
  lanes = SamplerConfig(lanes=a.questions * a.samples, length=a.length, block=a.block, rows=a.rows)
  sampler = JaxSampler(model, lanes, NoText())

  def run(new):
    sampler.load(params, 0)
    return sampler.generate(
      [
        Request((0, q, k), tuple(prompt), new, last=True)
        for q, prompt in enumerate(prompts)
        for k in range(a.samples)
      ]
    )

  return run


def theirs(reference, a, prompts):
  """new tokens -> generate's token ids [Q K, prompt + new]."""
  import torch

  reference.eval()
  reference.generation_config.eos_token_id = None
  reference.generation_config.pad_token_id = 0
  ids = torch.tensor(prompts)

  def run(new):
    with torch.inference_mode():
      out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=a.samples,
        max_new_tokens=new,
      )
    if out.shape != (len(prompts) * a.samples, a.prompt + new):
      raise RuntimeError(
        f"generate returned {tuple(out.shape)} tokens; the comparison needs equal numbers"
      )
    return out

  return run


def largest_gap(reference, prompts, completions) -> float:
  """Largest difference of a sampled token's log-prob from the reference's: both are one policy."""
  import torch

  gap = 0.0
  for done in completions:
    ids = torch.tensor([list(prompts[done.key[1]]) + list(done.token_ids)])
    with torch.inference_mode():
      logp = reference(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    gap = max(
      gap, float(np.abs(logp[-len(done.token_ids) :].numpy() - np.array(done.log_probs)).max())
    )
  return gap


def measure(a) -> list[dict]:
  config = paired_timing.config_of(a.model)
  model, params, reference = paired_timing.load(config)
  prompts = np.random.default_rng(0).integers(0, model.vocab_size, (a.questions, a.prompt)).tolist()
  run = {
    "stratified": ours(model, params, a, prompts),
    "transformers": theirs(reference, a, prompts),
  }
  gap = largest_gap(reference, prompts, run["stratified"](a.new)[:: a.samples])
  print(
    f"{a.model}: {paired_timing.count(params) / 1e6:.2f}M parameters, {a.questions} questions x "
    f"{a.samples} samples, "
    f"prompt {a.prompt}, {a.new} new tokens, {a.cores} cores; log-probs of the two differ by at "
    f"most {gap:.1e}"
  )
  if gap > 1e-3:
    raise RuntimeError(
      f"the two models' log-probs differ by {gap:.2e}, more than 1e-3: they are not the same policy"
    )
  sides = {
    (name, new): (lambda f=f, new=new: f(new))
    for new in (a.new, a.block)
    for name, f in run.items()
  }
  times = paired_timing.in_turns(sides, a.repeats)
  lanes, rows = a.questions * a.samples, []
  for name in run:
    whole, short = times[name, a.new], times[name, a.block]
    rows.append(
      dict(
        name=name,
        model=a.model,
        cores_busy=whole.cores,
        wall_s=whole.wall,
        processor_s=whole.processor,
        rollout=lanes * a.new / whole.median,
        decode=lanes * (a.new - a.block) / (whole.median - short.median),
      )
    )
  return rows


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", default="tiny", help="tiny, or a Hugging Face directory")
  for name, what in (
    ("questions", "questions"),
    ("samples", "rollouts of each"),
    ("prompt", "tokens of a prompt"),
    ("new", "tokens sampled by each rollout"),
    ("length", "tokens a lane holds; prompt + new if not given"),
  ):
    parser.add_argument(f"--{name}", type=int, help=what)
  parser.add_argument(
    "--block", type=int, default=16, help="tokens the sampler decodes between two looks"
  )
  parser.add_argument("--rows", type=int, default=8, help="prompts of one prefill call")
  parser.add_argument("--cores", type=int, default=2)
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--json", help="write the measurements to this file")
  a = parser.parse_args()
  for name, value in SHAPES["tiny" if a.model == "tiny" else "other"].items():
    setattr(a, name, getattr(a, name) or value)
  a.length = a.length or a.prompt + a.new
  paired_timing.use_cores(a.cores)
  rows = measure(a)
  print(
    "                prefill and decode   decode alone   cores busy   (tokens sampled a second, "
    "median)"
  )
  for row in rows:
    print(
      f"{row['name']:14} {row['rollout']:19,.0f} {row['decode']:14,.0f} {row['cores_busy']:12.2f}"
    )
  mine, other = rows
  print(
    f"ratio          {mine['rollout'] / other['rollout']:18.2f}x "
    f"{mine['decode'] / other['decode']:13.2f}x"
  )
  if a.json:
    with open(a.json, "w", encoding="utf-8") as file:
      json.dump(rows, file, indent=1)


if __name__ == "__main__":
  main()
