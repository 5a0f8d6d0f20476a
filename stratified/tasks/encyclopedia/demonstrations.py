"""Makes demonstrations for the warm start: a scripted policy behind the sampler's interface.

The script runs through the same agent loop, protocol and retriever as the policy that learns from
it, so its trajectories have exactly the form that the policy will produce. It mixes four
strategies, whatever the question: search n times, n = 0 to 3, then answer with the last value
found. It follows the question's chain as far as that goes: with too few searches it answers too
early, with too many it wanders past the answer. Only n = hops is right. What is left to learn by
reward is which n a question calls for.
"""

from collections.abc import Sequence
import dataclasses
import re
from typing import Any, Literal

import numpy as np

from stratified.agents import tags
from stratified.config import setting, Settings
from stratified.data.tokenizer import Tokenizer
from stratified.sampling.interface import Completion, Request
from stratified.tasks.draws import check_mixture, DEMONSTRATION, generator
from stratified.tasks.encyclopedia.pages import Encyclopedia, facts_in
from stratified.tasks.encyclopedia.questions import Chain, chain_of
from stratified.types import Question

_PLANS = ("query", "think", "none")
_DOCUMENT = re.compile(
  r"Doc \d+\(Title: ([^)]*)\) (.*?)(?=\nDoc \d+\(Title: |</[a-z]+>)", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class DemonstrationConfig(Settings):
  """What the script does.

  mixture: share of rollouts that search 0, 1, 2, 3 times, drawn apart from the question.
  plan: where a turn says which fact it is after: in the query ("Marvel Dortim birthplace"), in a
    `<think>` of its own before it, or nowhere.
  guess: of the rollouts that answer a question of 1 to 3 hops without a search, the share that
    names a random entity of the right kind; the others name the entity that the question starts
    from.
  wrong_query: share of queries whose name is cut or swapped.
  max_turns: turns that may search; the generation after them answers.
  """

  SECTION = "warm_start"
  mixture: tuple[float, ...] = setting(
    (0.15, 0.2, 0.25, 0.4),
    "shares of the demonstrations that call a tool 0, 1, 2, ... times",
    affects=["warm_start"],
  )
  right_calls: float = setting(
    0.0,
    "share of demonstrations that call as often as the question needs; mixture has the others",
    low=0,
    high=1,
    affects=["warm_start"],
  )
  wrong_query: float = setting(
    0.02, "share of searches with a spoilt query", low=0, high=1, affects=["warm_start"]
  )
  wrong_relation: float = setting(
    0.02,
    "share of searches after which another fact is read off the page",
    low=0,
    high=1,
    affects=["warm_start"],
  )
  invalid: float = setting(
    0.005,
    "share of turns that neither call a tool nor answer",
    low=0,
    high=1,
    affects=["warm_start"],
  )
  encyclopedias: int = setting(
    24,
    "practice encyclopedias, so that none is learnt by heart",
    low=1,
    high=1000,
    affects=["warm_start"],
  )
  plan: Literal["query", "think", "none"] = "query"
  guess: float = 0.25
  max_turns: int = 4

  def __post_init__(self):
    super().__post_init__()
    check_mixture(self.mixture, self.max_turns)
    if not 0 <= self.guess <= 1:
      raise ValueError(f"demonstration setting guess={self.guess} is no share: choose from 0 to 1")
    if self.plan not in _PLANS:
      raise ValueError(
        f"demonstration plan {self.plan!r} is unknown: choose one of {', '.join(_PLANS)}"
      )

  def draw_calls(self, needed: int, rng: np.random.Generator) -> int:
    """Draws how many calls a rollout sets out to make, of a question that needs `needed`."""
    if self.right_calls and rng.random() < self.right_calls:
      return min(needed, self.max_turns)
    return int(rng.choice(len(self.mixture), p=self.mixture))


@dataclasses.dataclass
class _Script:
  """Where a rollout stands.

  position: searches made. current: last value found. relation: sought next.
  seen: tokens of the context up to the end of the script's last turn. turn: its turns that could
    search.
  nouns: the question's words for the chain's relations.
  """

  chain: Chain
  nouns: tuple[str, ...]
  depth: int
  rng: np.random.Generator
  current: str
  seen: int = 0
  turn: int = 0
  position: int = 0
  relation: str | None = None
  visited: tuple[str, ...] = ()


class Demonstrator:
  """A sampler (submit, poll, load) that plays the script; log-probs are 0, its turns are certain.

  `begin` names the step's questions; a request's key (step, question index, sample) then says whose
  turn it is, and the random choices of a rollout are functions of (seed, key) alone.
  """

  def __init__(
    self,
    encyclopedia: Encyclopedia,
    tokenizer: Tokenizer,
    *,
    seed: int,
    config: DemonstrationConfig = DemonstrationConfig(),
    protocol: tags.Tags = tags.short(),
  ):
    """protocol: how answers, and what was learnt from a page, are written."""
    self._protocol = protocol
    self._encyclopedia, self._tokenizer, self._seed, self._config = (
      encyclopedia,
      tokenizer,
      seed,
      config,
    )
    self._questions: Sequence[Question] = ()
    self._step = -1
    self._scripts: dict[tuple[int, int, int], _Script] = {}
    self._done: list[Completion] = []

  def begin(self, step: int, questions: Sequence[Question]) -> None:
    """Names the questions of `step`; rollouts of an earlier step are forgotten."""
    self._step, self._questions = step, tuple(questions)
    self._scripts.clear()
    self._done.clear()

  def depth(self, key: tuple[int, int, int]) -> int:
    """Draws how many searches the rollout of this key sets out to make."""
    return self._config.draw_calls(self._questions[key[1]].hops, self._generator(key))

  def submit(self, request: Request) -> None:
    script = self._scripts.get(request.key)
    if script is None:
      script = self._scripts[request.key] = self._script(request.key)
    fed = self._tokenizer.decode(request.token_ids[script.seen :])
    token_ids = self._turn(script, fed)
    finish = "stop"
    if len(token_ids) > request.max_new_tokens:
      token_ids, finish = token_ids[: request.max_new_tokens], "length"
    script.seen = len(request.token_ids) + len(token_ids)
    if request.last:
      del self._scripts[request.key]
    self._done.append(Completion(request.key, token_ids, (0.0,) * len(token_ids), finish))

  def poll(self) -> list[Completion]:
    done, self._done = self._done, []
    return done

  def load(self, params: Any, step: int) -> None:
    """A script has no parameters."""

  def _generator(self, key: tuple[int, int, int]) -> np.random.Generator:
    return generator(self._seed, *key, DEMONSTRATION)

  def _script(self, key: tuple[int, int, int]) -> _Script:
    step, index, _ = key
    if step != self._step or index >= len(self._questions):
      raise ValueError(
        f"the demonstrator was told the {len(self._questions)} questions of step {self._step}, but "
        "is "
        f"asked for question {index} of step {step}: call begin(step, questions) first"
      )
    question = self._questions[index]
    chain = chain_of(self._encyclopedia, question)
    rng = self._generator(key)
    depth = self._config.draw_calls(chain.hops, rng)
    return _Script(chain, _nouns(chain, question.text), depth, rng, chain.entities[0])

  def _turn(self, script: _Script, fed: str) -> tuple[int, ...]:
    """Makes the tokens of the next turn, given what was fed since the last one."""
    learnt = ""
    if script.relation is not None:
      self._read(script, fed)
      learnt = self._protocol.digested(script.current)
    if script.position >= script.depth or script.turn >= self._config.max_turns:
      return self._encode(learnt + self._protocol.answered(self._answer(script)))
    script.turn += 1
    if script.rng.random() < self._config.invalid:
      return (*self._encode(f"{learnt} {script.current}"), self._tokenizer.eos_id)
    return self._encode(learnt + self._search(script))

  def _encode(self, text: str) -> tuple[int, ...]:
    return tuple(self._tokenizer.encode(text))

  def _search(self, script: _Script) -> str:
    noun = self._choose_relation(script)
    query = script.current
    if script.rng.random() < self._config.wrong_query:
      query = _spoil(query, self._encyclopedia, script.rng)
    if self._config.plan == "query":
      return f"<search> {query} {noun}</search>"
    think = f"<think> {noun}</think>" if self._config.plan == "think" else ""
    return f"{think}<search> {query}</search>"

  def _choose_relation(self, script: _Script) -> str:
    """Sets the relation sought next, the chain's or a random new one; returns its noun."""
    if script.position < len(script.chain.relations):
      script.relation = script.chain.relations[script.position]
      return script.nouns[script.position]
    entity = self._encyclopedia.by_name.get(script.current)
    facts = entity.facts if entity else dict.fromkeys(script.chain.relations)
    fresh = [name for name, value in facts.items() if value not in script.visited] or list(facts)
    script.relation = fresh[script.rng.integers(len(fresh))]
    return script.relation

  def _read(self, script: _Script, fed: str) -> None:
    """Reads the value sought off the page that was searched for, else off the first, if any."""
    documents = _DOCUMENT.findall(fed)
    own = [text for title, text in documents if title == script.current]
    text = next(iter(own or [text for _, text in documents]), "")
    facts = facts_in(text)
    others = [name for name in facts if name != script.relation]
    if others and (
      script.relation not in facts or script.rng.random() < self._config.wrong_relation
    ):
      script.relation = others[script.rng.integers(len(others))]
    script.visited += (script.current,)
    script.current = facts.get(script.relation, script.current)
    script.position += 1
    script.relation = None

  def _answer(self, script: _Script) -> str:
    if script.depth > 0:
      return script.current
    if script.chain.hops == 0:
      return script.chain.answer
    if script.rng.random() < self._config.guess:
      kind = self._encyclopedia.by_name[script.chain.answer].kind
      pool = self._encyclopedia.by_kind[kind]
      return pool[script.rng.integers(len(pool))].name
    return script.current


def _nouns(chain: Chain, text: str) -> tuple[str, ...]:
  """The question's words for its relations, from the head outwards, or else their names."""
  found = re.findall(r"the (\w+) of", text)[::-1]
  return tuple(found) if len(found) == len(chain.relations) else chain.relations


def _spoil(name: str, encyclopedia: Encyclopedia, rng: np.random.Generator) -> str:
  """Drops a word of the name, or swaps one for a word of another name."""
  words = name.split()
  position = int(rng.integers(len(words)))
  if len(words) > 1 and rng.random() < 0.5:
    return " ".join(words[:position] + words[position + 1 :])
  other = encyclopedia.entities[rng.integers(len(encyclopedia.entities))].name.split()
  words[position] = other[rng.integers(len(other))]
  return " ".join(words)
