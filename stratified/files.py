"""Reads and writes JSON and JSON Lines; replaces files whole."""

from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any


def write_atomic(path: str | os.PathLike, text: str) -> None:
  """Puts `text` (UTF-8) at `path` whole or not at all: readers see the old file or the new one."""
  path = pathlib.Path(path)
  part = path.with_name(path.name + ".part")
  with part.open("w", encoding="utf-8", newline="\n") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(part, path)


def read_object(
  path: str | os.PathLike, way_out: str = "bring it back from a copy, or use a new --workdir"
) -> dict[str, Any]:
  """The JSON object that a small file holds; raises ValueError, naming the file and the way out, where it holds none."""
  try:
    value = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(
      f"{os.fspath(path)} is not JSON ({error}), so it is damaged; {way_out}"
    ) from error
  if not isinstance(value, dict):
    raise ValueError(f"{os.fspath(path)} is no JSON object, so it is damaged; {way_out}")
  return value


def read_rows(path: str | os.PathLike) -> tuple[list[dict[str, Any]], int]:
  """Reads a JSONL file leniently: (its objects, the number of lines that are none). No file is no rows."""
  path = pathlib.Path(path)
  lines = path.read_bytes().split(b"\n") if path.exists() else []
  parsed = [parse_object(line) for line in lines if line.strip()]
  rows = [row for row in parsed if row is not None]
  return rows, len(parsed) - len(rows)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested mappings as one with dotted keys: {"a": {"b": 1}} -> {"a.b": 1}. An empty one stays a value."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[f"{prefix}{key}"] = value
  return flat


def parse_object(line: bytes) -> dict[str, Any] | None:
  try:
    row = json.loads(line)
  except ValueError:
    return None
  return row if isinstance(row, dict) else None
