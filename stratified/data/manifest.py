"""manifest.json of a prepared folder: what stands in each file and where it came from, checked as it is read."""

import json
import os
import pathlib
import re
from typing import Any

# What an entry of "files" must hold.
_ENTRY = {"count": int, "bytes": int, "sha256": str, "set": str, "licence": str, "sources": list}


def load(path: str | os.PathLike) -> dict[str, Any]:
  """{"files": {path: entry}, "duplicates": ...} of an earlier call; no files where there is no manifest yet.

  Raises ValueError, naming the file and what is wrong, for what is no manifest: it is never replaced unseen.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return {"files": {}}
  try:
    known = json.loads(path.read_text(encoding="utf-8-sig"))
    wrong = _wrong(known)
  except OSError as error:
    wrong = error.strerror
  except (ValueError, RecursionError) as error:
    wrong = f"not JSON: {error}"
  if wrong:
    raise ValueError(f"{path} is no manifest of prepared data ({wrong}); mend it or move it away")
  return known


def _wrong(known) -> str | None:
  if not isinstance(known, dict) or not isinstance(known.get("files"), dict):
    return 'it must be an object whose "files" is an object'
  if not isinstance(known.get("duplicates", {}), dict):
    return '"duplicates" must be an object'
  for name, entry in known["files"].items():
    if not isinstance(entry, dict):
      return f"the entry of {name!r} must be an object"
    for field, kind in _ENTRY.items():
      if not isinstance(entry.get(field), kind) or isinstance(entry[field], bool):
        return f'"{field}" of {name!r} is {entry.get(field)!r}, but must be of type {kind.__name__}'
    if not _counts(entry.get("left_out", {"count": 0, "by_benchmark": {}})):
      return f'"left_out" of {name!r} must hold a "count" and counts "by_benchmark"'
  return None


def _counts(left_out) -> bool:
  if not isinstance(left_out, dict) or not isinstance(left_out.get("by_benchmark"), dict):
    return False
  return all(type(count) is int for count in (left_out.get("count"), *left_out["by_benchmark"].values()))


def left_out(entry: dict[str, Any]) -> tuple[int, dict[str, int]]:
  """(training questions left out of a file so far, how many of them stand in each benchmark)."""
  found = entry.get("left_out", {})
  return found.get("count", 0), found.get("by_benchmark", {})


def is_plain_name(name: str) -> bool:
  """Whether a name stays in its folder: letters, digits, and `_ . - +` and spaces within it; no separator, no `..`."""
  return bool(re.fullmatch(r"\w([\w.+\- ]*[\w+\-])?", name))
