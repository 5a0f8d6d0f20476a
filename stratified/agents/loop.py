"""Runs the rollouts of a step: many generators, one sampler, a few tools.

    questions -> K rollouts each -> submit -> poll -> (one batch of calls a tool) -> submit -> ...
    -> trajectories

Each round takes what the sampler has finished, lets those rollouts act, runs all their calls of a
tool in one batch, and submits what they ask for next, in the order of their keys. What a rollout
does depends on its own completions and results alone: with a sampler that draws by key, the result
does not depend on the clock.
"""

from collections.abc import Callable, Sequence

from stratified.agents import agent, rollout_setting
from stratified.agents.limits import Limits
from stratified.agents.tags import Tags
from stratified.sampling.interface import Request, Sampler
from stratified.tools import base
from stratified.tools.base import Asker, Tool, ToolError
from stratified.types import Question, Segment, Trajectory

Key = tuple[int, int, int]


def collect(
  questions: Sequence[Question],
  *,
  sampler: Sampler,
  tools: Sequence[Tool],
  tokenizer,
  protocol: Tags,
  limits: Limits,
  samples_per_question: int,
  step: int,
  weight_version: int | None = None,
  progress: Callable[[int, int], None] | None = None,
  indices: Sequence[int] | None = None,
  on_end: Callable[[Trajectory], None] | None = None,
) -> list[list[Trajectory]]:
  """Makes K rollouts of each question.

  Args:
    questions: [Q].
    sampler: see sampling/interface.py; requests carry the key (step, index of the question,
      sample).
    tools: see tools/base.py; each is run once a round, with the distinct arguments of all waiting
      rollouts (and of their questions, for a tool that is told who asks). A ToolError in place of a
      Result loses the rollouts that made this call, a raised one all of that round.
    tokenizer: `encode(str) -> list[int]`, `decode(list[int]) -> str`, `eos_id`.
    protocol: what is fed and how text is read, see tags.py.
    limits: see Limits.
    samples_per_question: K, at least 1.
    step: names the random keys.
    weight_version: the step whose parameters the sampler holds; `step` where not given.
    progress: called with (rollouts ended, rollouts in all) after each round.
    indices: [Q] the questions' numbers in the keys, 0, 1, ... where not given: a part of the
      questions run by itself (the rest of an evaluation that was stopped) gets the same random keys
      as within the whole.
    on_end: called with each trajectory as soon as it has ended.

  Returns:
    [Q][K] trajectories in the order of `questions` and samples. One lost to the sampler, a
    tool or an over-long prompt has `fault` set.

  Raises:
    ValueError: limits too small for the protocol, or for the prompt of every question; a protocol
      with a tool that is not there; sampled tokens without their log-probs; indices that do not
      name each question once.
    RuntimeError, TypeError: the sampler, or a tool, broke its interface.
  """
  if samples_per_question < 1:
    raise ValueError(f"samples_per_question is {samples_per_question}; it must be at least 1")
  version = step if weight_version is None else weight_version
  setting = rollout_setting.Setting.of(
    tokenizer, protocol, limits, version, _remember(tokenizer.encode)
  )
  by_name = {tool.name: tool for tool in tools}
  if set(protocol.tools) - by_name.keys():
    raise ValueError(
      f"the protocol lets the policy call {', '.join(protocol.tools)}, but the tools are "
      f"{', '.join(by_name) or 'none'}; give it the tools that it names"
    )
  rollout_setting.check(setting)
  indices = list(range(len(questions)) if indices is None else indices)
  if len(set(indices)) != len(questions) or len(indices) != len(questions):
    raise ValueError(
      f"{len(indices)} indices, {len(set(indices))} of them distinct, for {len(questions)} "
      "questions; "
      "each question needs a number of its own"
    )
  ended = _Ended(on_end)
  rollouts = _start(zip(indices, questions), samples_per_question, step, setting, ended)
  askers = {q: Asker(step, question) for q, question in zip(indices, questions)}
  _drive(rollouts, ended, sampler, by_name, askers, progress)
  return [[ended[step, q, k] for k in range(samples_per_question)] for q in indices]


class _Ended(dict):
  """Keeps trajectories by key, and tells `on_end` of each."""

  def __init__(self, on_end):
    super().__init__()
    self._on_end = on_end

  def __setitem__(self, key, trajectory):
    super().__setitem__(key, trajectory)
    if self._on_end:
      self._on_end(trajectory)


def _remember(encode: Callable) -> Callable[[str], tuple[int, ...]]:
  """Encodes each text once: rollouts of a question share their prompt and most passages."""
  known = {}

  def remembered(text):
    if text not in known:
      known[text] = tuple(encode(text))
    return known[text]

  return remembered


def _start(numbered, samples, step, setting, ended) -> dict[Key, agent.Rollout]:
  """Starts the generators of all rollouts; those whose prompt does not fit go into `ended`."""
  rollouts, lost, faults = {}, {}, []
  run = getattr(setting.protocol, "rollout", None) or agent.run
  for q, question in numbered:
    pieces = rollout_setting.prompt_pieces(setting, question.text)
    prompt_ids, fault = pieces[0], rollout_setting.prompt_fault(setting, pieces)
    if fault:
      faults.append(f"question {question.id!r}: {fault}")
    for k in range(samples):
      key = (step, q, k)
      if fault:
        lost[key] = Trajectory(
          question,
          k,
          (Segment(prompt_ids, "prompt"),),
          stop="fault",
          fault=fault,
          weight_version=setting.weight_version,
        )
      else:
        rollouts[key] = run(setting, question, key, prompt_ids)
  if faults and not rollouts:
    raise ValueError(f"no question fits its budget; the first, {faults[0]}")
  for key, trajectory in lost.items():
    ended[key] = trajectory
  return rollouts


def _drive(rollouts, ended, sampler, tools, askers, progress):
  """Advances every rollout to its end; fills `ended`."""
  total = len(rollouts) + len(ended)
  # key of the generation -> that of its rollout; they differ for one beside the rollout
  waiting = {}
  sends = {key: None for key in rollouts}
  while sends:
    requests = _advance(sends, rollouts, ended, tools, askers)
    for key in sorted(requests):
      sampler.submit(requests[key])
      waiting[requests[key].key] = key
    if progress:
      progress(len(ended), total)
    sends = _poll(sampler, waiting) if waiting else {}


def _advance(sends, rollouts, ended, tools, askers) -> dict[Key, Request]:
  """Sends each rollout its result, and runs tools until all have ended or want the sampler."""
  requests = {}
  while sends:
    uses = {}
    for key, value in sends.items():
      try:
        effect = rollouts[key].send(value)
      except StopIteration as stop:
        ended[key] = stop.value
        continue
      (requests if isinstance(effect, Request) else uses)[key] = effect
    sends = _run(uses, tools, askers) if uses else {}
  return requests


def _run(uses: dict[Key, agent.Use], tools: dict[str, Tool], askers: dict[int, Asker]) -> dict:
  """Runs each tool once with the distinct arguments of all calls; results, or errors, by key."""
  told = {name for name, tool in tools.items() if base.takes_askers(tool)}
  calls = {
    key: [
      (name, argument, askers[key[1]] if name in told else None) for name, argument in use.calls
    ]
    for key, use in uses.items()
  }
  distinct = list(dict.fromkeys(call for of in calls.values() for call in of))
  found = {}
  for name in dict.fromkeys(name for name, *_ in distinct):
    if name not in tools:
      raise ValueError(
        f"the protocol calls {name!r}, but the tools are {', '.join(tools) or 'none'}; give it that"
      )
    mine = [call for call in distinct if call[0] == name]
    _, arguments, asked_by = map(list, zip(*mine))
    found |= dict(zip(mine, base.results_of(tools[name], arguments, asked_by)))
  return {key: _together([found[call] for call in of]) for key, of in calls.items()}


def _together(results: list) -> list | ToolError:
  """Joins a turn's results; one error among them is the whole turn's, which is then lost."""
  return next((result for result in results if isinstance(result, ToolError)), results)


def _poll(sampler, waiting: dict[Key, Key]) -> dict:
  """Takes what the sampler has finished, by rollout and in the order of keys.

  A sampler that breaks its interface raises an error; it never hangs the loop.
  """
  completions = {completion.key: completion for completion in sampler.poll()}
  if not completions:
    raise RuntimeError(
      f"the sampler's poll() returned nothing while {len(waiting)} generations are running"
    )
  strangers = completions.keys() - waiting.keys()
  if strangers:
    raise RuntimeError(
      f"the sampler returned a generation for {min(strangers)}, which was not submitted "
      "or has already ended"
    )
  return {waiting.pop(key): completions[key] for key in sorted(completions)}
