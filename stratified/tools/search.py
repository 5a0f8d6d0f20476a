"""Searches as a tool: the queries of a round in one call of a retriever."""

from collections.abc import Sequence
import dataclasses

from stratified.config import setting, Settings
from stratified.retrieval.corpus import RetrieverError, searchable
from stratified.tools.base import Asker, Result, ToolError


@dataclasses.dataclass(frozen=True)
class SearchSettings(Settings):
  """How much a search brings."""

  SECTION = "rollout"
  topk: int = setting(3, "passages that a search brings for each query", low=1, high=1000)


class Search:
  """Finds passages for queries in plain words.

  retriever: `search(queries, topk) -> list[list[Passage]]`, one list a query. A RetrieverError in
    place of a list loses the rollouts that asked this query; a raised one loses all of that round.
    One that has `search_for` is told the step and the question of each query, see noise.Noisy.
  topk: passages per query.
  """

  name = "search"
  description = "Searches an encyclopedia and returns the passages that fit each query best."
  schema = {
    "type": "object",
    "properties": {
      "query_list": {
        "type": "array",
        "items": {"type": "string"},
        "description": "Queries in plain words, each searched on its own.",
      }
    },
    "required": ["query_list"],
  }
  aliases = ("query",)

  def __init__(self, retriever, topk: int = SearchSettings.topk):
    self.retriever, self.topk = retriever, topk

  @property
  def manifest(self) -> dict:
    """What is searched, as the retriever says it; {} where it does not say."""
    return getattr(self.retriever, "manifest", {})

  @property
  def takes_askers(self) -> bool:
    return hasattr(self.retriever, "search_for")

  def row_at(self, step: int) -> dict[str, float]:
    return self.retriever.row_at(step) if hasattr(self.retriever, "row_at") else {}

  def run(self, calls: Sequence[str], askers: Sequence[Asker] = ()) -> list[Result | ToolError]:
    try:
      found = self._found([searchable(call) for call in calls], askers)
    except RetrieverError as error:
      raise ToolError(str(error)) from error
    return [
      ToolError(str(one)) if isinstance(one, RetrieverError) else Result(tuple(one))
      for one in found
    ]

  def _found(self, queries: list[str], askers: Sequence[Asker]) -> list:
    """What the retriever finds for each query; nothing for an empty one, which is not asked."""
    search, keys = self.retriever.search, queries
    if askers:
      search = self.retriever.search_for
      keys = [(q, asker.step, asker.question) for q, asker in zip(queries, askers, strict=True)]
    asked = list(dict.fromkeys(key for query, key in zip(queries, keys) if query))
    found = search(asked, self.topk) if asked else []
    if len(found) != len(asked):
      raise RetrieverError(f"the retriever returned {len(found)} results for {len(asked)} queries")
    by_key = dict(zip(asked, found))
    return [by_key.get(key, []) for key in keys]
