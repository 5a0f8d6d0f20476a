"""Remembers the passages of recent queries: rollouts of a question often ask the same."""

from collections import OrderedDict
from collections.abc import Sequence
import threading

from stratified.retrieval.corpus import Passage, RetrieverError


class Cached:
  """Stands in front of a retriever and remembers its last `capacity` queries with their topk.

  Errors are not remembered. `hits` and `misses` count queries; of equal queries in one call the
  first is a miss and the others are hits. Several threads may search one object.
  """

  def __init__(self, retriever, capacity: int):
    if capacity < 1:
      raise ValueError(f"the cache's capacity is {capacity}; it must be at least 1 query")
    self.retriever, self.capacity, self.hits, self.misses = retriever, capacity, 0, 0
    self._known: OrderedDict[tuple[str, int], list[Passage]] = OrderedDict()
    self._lock = threading.Lock()

  @property
  def manifest(self) -> dict:
    return self.retriever.manifest

  def search(self, queries: Sequence[str], topk: int) -> list[list[Passage] | RetrieverError]:
    if isinstance(queries, str):
      raise TypeError(
        f"queries is the string {queries!r}; search takes a sequence of queries, [query]."
      )
    with self._lock:
      found = {query: self._known[query, topk] for query in queries if (query, topk) in self._known}
      for query in found:
        self._known.move_to_end((query, topk))
    unknown = list(dict.fromkeys(query for query in queries if query not in found))
    self.misses += len(unknown)
    self.hits += len(queries) - len(unknown)
    if unknown:
      results = self.retriever.search(unknown, topk)
      if len(results) != len(unknown):
        raise RetrieverError(
          f"the retriever returned {len(results)} results for {len(unknown)} queries"
        )
      found.update(zip(unknown, results))
      with self._lock:
        self._remember(
          {
            query: result
            for query, result in zip(unknown, results)
            if not isinstance(result, RetrieverError)
          },
          topk,
        )
    # A caller may change its list; the remembered one stays.
    return [
      result if isinstance(result, RetrieverError) else list(result)
      for result in map(found.get, queries)
    ]

  def _remember(self, results: dict[str, list[Passage]], topk: int) -> None:
    for query, passages in results.items():
      self._known[query, topk] = list(passages)
    while len(self._known) > self.capacity:
      self._known.popitem(last=False)
