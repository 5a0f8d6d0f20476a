"""manifest.json of a prepared folder: what stands in each file, and where it came from."""

from collections import Counter
from collections.abc import Iterable
import os
import pathlib
from typing import Any

from stratified import files
from stratified.data import duplicates, prepare

# What an entry of "files" must hold.
_ENTRY = {"count": int, "bytes": int, "sha256": str, "set": str, "licence": str, "sources": list}


def load(path: str | os.PathLike) -> dict[str, Any]:
  """Reads {"files": {path: entry}, "duplicates": ...} of an earlier call; no files without one.

  Raises ValueError, naming the file and what is wrong, for what is no manifest: it is never
  replaced unseen.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return {"files": {}}
  try:
    known = files.parse(path.read_text(encoding="utf-8-sig"))
    wrong = _wrong(known)
  except OSError as error:
    wrong = error.strerror
  except ValueError as error:
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
  return all(
    type(count) is int for count in (left_out.get("count"), *left_out["by_benchmark"].values())
  )


def duplicates_of(
  report: duplicates.Report, entries: dict[str, dict], benchmarks: Iterable[str], remove: bool
) -> dict[str, Any]:
  """Makes the manifest's "duplicates", and notes in the files' `entries` what is left out now.

  entries: {training set: entry of its file}. What earlier calls left out of a file, which a
  comparison of today no longer finds in it, still counts.
  """
  across, removed = {}, {}
  for name, now in report.removed.items():
    before = entries[name].get("left_out", {"count": 0, "by_benchmark": {}})
    fresh = {other: report.across.get(f"{name} / {other}", 0) for other in benchmarks}
    total = dict(Counter(before["by_benchmark"]) + Counter(fresh))
    across |= {f"{name} / {other}": number for other, number in total.items()}
    count = before["count"] + (now if remove else 0)
    if remove and now:
      entries[name]["left_out"] = {"count": count, "by_benchmark": total}
    if remove or count:
      removed[name] = count
  return {
    "across": across,
    "within": report.within,
    "between_training_sets": report.between,
    "removed": removed,
  }


def source_of(path: pathlib.Path) -> dict[str, Any]:
  """Tells where a file came from: its address if it was downloaded, and its hash."""
  try:
    note = files.read_object(path.with_name(path.name + ".source.json"))
    known = {key: note[key] for key in ("url", "sha256", "bytes")}
    if known["bytes"] == path.stat().st_size:
      return known
  except (FileNotFoundError, ValueError, KeyError, TypeError):
    pass  # no note, or one of a download that was never finished: the file speaks for itself
  return {"file": path.name} | hashes_of(path)


def hashes_of(path: pathlib.Path) -> dict[str, Any]:
  return {"sha256": prepare.sha256_of(path), "bytes": path.stat().st_size}


def is_plain_name(name: str) -> bool:
  """Whether a name stays in its folder: no separator, no control character, no leading dot."""
  return (
    bool(name.strip())
    and name.isprintable()
    and not name.startswith(".")
    and not set(name) & set("/\\")
  )
