"""Reads and writes the wire format of a retrieval server, Search-R1's JSON; sends nothing.

    POST /retrieve  {"queries": ["who ...", ...], "topk": 3, "return_scores": true}
    200  {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 1.5},
         ...], ...]}

Without `return_scores` (it is false where it is left out) an item is the bare document. `query` may
stand for `queries` and be a single string; `topk` null, 0 or left out is the server's default. An
error is {"error": "one sentence"} with a status of 400 or more.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import math
from typing import Any

from stratified.retrieval.corpus import Passage, passage_from_contents

PATH, HEALTH_PATH = "/retrieve", "/health"
# Reply header: which index found this, as `digest` of its manifest, so that a client notices
# another one.
INDEX_HEADER = "x-retriever-index"


class BadRequest(ValueError):
  """A request that can't be answered as it stands. `status` is the HTTP status that says so."""

  def __init__(self, message: str, status: int = 400):
    super().__init__(message)
    self.status = status


@dataclasses.dataclass(frozen=True)
class Bounds:
  """What one request may ask for.

  max_queries: queries. Search-R1's trainer sends a whole batch's (512 x 5) at once.
  max_query_characters: characters of one query.
  max_topk: passages a query.
  max_body_bytes: bytes of the request's body.
  """

  max_queries: int = 4096
  max_query_characters: int = 8192
  max_topk: int = 100
  max_body_bytes: int = 16 * 2**20

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if getattr(self, field.name) < 1:
        raise ValueError(f"{field.name} is {getattr(self, field.name)}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class Ask:
  """A request to search: `topk` passages for each of `queries`."""

  queries: tuple[str, ...]
  topk: int
  return_scores: bool


def request_body(queries: Sequence[str], topk: int) -> bytes:
  return json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()


def parse_request(body: bytes, *, default_topk: int, bounds: Bounds) -> Ask:
  """Reads a request's body; raises BadRequest with the field, the value and what it must be."""
  try:
    record = json.loads(body)
  except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
    raise BadRequest(f"the body is not JSON ({error})") from error
  if not isinstance(record, dict):
    raise BadRequest(
      f"the body is a JSON {type(record).__name__}; it must be an object with queries"
    )
  return Ask(
    _queries(record, bounds),
    _topk(record.get("topk"), default_topk, bounds),
    _return_scores(record),
  )


def _queries(record: dict, bounds: Bounds) -> tuple[str, ...]:
  given = [name for name in ("queries", "query") if record.get(name) is not None]
  if len(given) != 1:
    found = "both are there" if given else f"neither is there (fields: {_some(sorted(record))})"
    raise BadRequest(f"the body must hold either queries or query; {found}")
  name, value = given[0], record[given[0]]
  queries = [value] if isinstance(value, str) else value
  if not isinstance(queries, list):
    raise BadRequest(
      f"{name} is a JSON {type(value).__name__}; it must be a list of strings, or one string"
    )
  if len(queries) > bounds.max_queries:
    raise BadRequest(
      f"{name} holds {len(queries)} queries, more than {bounds.max_queries}; send fewer at once",
      413,
    )
  for at, query in enumerate(queries):
    if not isinstance(query, str):
      raise BadRequest(
        f"{name}[{at}] is a JSON {type(query).__name__}; each query must be a string"
      )
    if len(query) > bounds.max_query_characters:
      raise BadRequest(
        f"{name}[{at}] has {len(query)} characters, more than {bounds.max_query_characters}", 413
      )
    if not _encodable(query):
      raise BadRequest(
        f"{name}[{at}] holds half of a surrogate pair, which no tokenizer can encode"
      )
  return tuple(queries)


def _topk(value: Any, default: int, bounds: Bounds) -> int:
  if value is None:
    return default
  if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= bounds.max_topk:
    raise BadRequest(
      f"topk is {_some(value)}; it must be a whole number from 1 to {bounds.max_topk}, "
      f"or 0 or null for {default}"
    )
  return value or default


def _return_scores(record: dict) -> bool:
  value = record.get("return_scores")
  if value is not None and not isinstance(value, bool):
    raise BadRequest(f"return_scores is {_some(value)}; it must be true or false")
  return bool(value)


def _some(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 60 else text[:60] + " ..."


def _encodable(text: str) -> bool:
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def reply_body(results: Sequence[Sequence[Passage]], *, return_scores: bool) -> bytes:
  """The body of a reply. A score that JSON has no number for (none, NaN, infinite) is null."""
  return json.dumps(
    {"result": [[_item(p, return_scores) for p in passages] for passages in results]},
    allow_nan=False,
  ).encode()


def _item(passage: Passage, with_score: bool) -> dict:
  document = _document(passage)
  return {"document": document, "score": _finite(passage.score)} if with_score else document


def _document(passage: Passage) -> dict:
  """`id` and `contents`; title and text too where `contents` alone would split elsewhere."""
  document = {"id": passage.id, "contents": passage.contents}
  if passage_from_contents(passage.id, passage.contents) != passage:
    document |= {"title": passage.title, "text": passage.text}
  return document


def _finite(score: Any) -> float | None:
  number = isinstance(score, (int, float)) and not isinstance(score, bool)
  return float(score) if number and math.isfinite(score) else None


def parse_reply(body: bytes, *, count: int, topk: int) -> list[list[Passage]]:
  """Reads at most `topk` passages for each of `count` queries; ValueError for nonsense."""
  try:
    record = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"the reply is not JSON ({error})") from error
  results = record.get("result") if isinstance(record, dict) else None
  if not isinstance(results, list):
    raise ValueError("the reply holds no list named result")
  if len(results) != count:
    raise ValueError(f"the reply holds {len(results)} results for {count} queries")
  for passages in results:
    if not isinstance(passages, list):
      raise ValueError(
        f"a result of the reply is a JSON {type(passages).__name__}, not a list of passages"
      )
  return [[_passage(item) for item in passages[:topk]] for passages in results]


def _passage(item: Any) -> Passage:
  """Reads an item: {"document": {...}, "score"}, the document alone, or its contents alone.

  Servers differ: what has no id is named by its contents, what has no score has none.
  """
  score = _finite(item.get("score")) if isinstance(item, dict) else None
  document = item.get("document", item) if isinstance(item, dict) else item
  if isinstance(document, str):
    document = {"contents": document}
  if not isinstance(document, dict):
    raise ValueError("a passage of the reply is neither a JSON object nor text")
  id, contents, title, text = (document.get(name) for name in ("id", "contents", "title", "text"))
  strings = lambda *values: all(isinstance(value, str) and _encodable(value) for value in values)
  whole = strings(title, text)
  if not whole and not strings(contents):
    raise ValueError(f"the passage {_some(id)} of the reply has no contents that are text")
  if id is None:
    named = f"{title}\n{text}" if whole else contents
    id = "contents-" + hashlib.sha256(named.encode()).hexdigest()[:16]
  if isinstance(id, int) and not isinstance(id, bool):
    id = str(id)
  if not strings(id):
    raise ValueError(
      f"a passage of the reply has the id {_some(id)}; it must be a string or a whole number"
    )
  if whole:
    return Passage(id, title, text, score)
  return passage_from_contents(id, contents, title if strings(title) and title else None, score)


def error_body(message: str) -> bytes:
  return json.dumps({"error": message}).encode()


def error_of(body: bytes) -> str:
  """Reads the sentence in an error's body, whoever's server wrote it; "" where there is none."""
  try:
    record = json.loads(body)
  except (ValueError, RecursionError):
    return ""
  found = record.get("error", record.get("detail")) if isinstance(record, dict) else None
  return "" if found is None else (found if isinstance(found, str) else json.dumps(found))[:300]


def digest(manifest: dict) -> str:
  """Digests a manifest: equal ones have equal digests, whatever the order of their keys."""
  return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
