"""Reads and writes JSON and JSON Lines; puts files and folders in place whole or not at all."""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import json
import os
import pathlib
import shutil
from typing import Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Yields the path of a file to write, which takes the place of `path` when the block ends.

  Readers see the old file or the new one, also after a power cut. A block that raises leaves the
  old file and removes the new one.
  """
  path = pathlib.Path(path)
  part = path.with_name(path.name + ".part")
  try:
    yield part
    settle(part, path)
  finally:
    part.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Yields an empty folder to fill, which becomes `path` when the block ends.

  `path` must not exist yet. A block that raises leaves nothing.
  """
  path = pathlib.Path(path)
  part = path.with_name(path.name + ".part")
  shutil.rmtree(part, ignore_errors=True)
  part.mkdir(parents=True)
  try:
    yield part
    os.replace(part, path)
  finally:
    shutil.rmtree(part, ignore_errors=True)


def settle(part: str | os.PathLike, path: str | os.PathLike) -> None:
  """Renames the finished file `part` to `path`, after its bytes have reached the disk."""
  with open(part, "rb") as file:
    os.fsync(file.fileno())
  os.replace(part, path)


def write_atomic(path: str | os.PathLike, content: str | bytes) -> None:
  """Puts text (as UTF-8) or bytes at `path` whole or not at all: readers see the old file or it."""
  with replacing(path) as part:
    part.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: str | os.PathLike, value: Any, **options: Any) -> None:
  """Puts `value` at `path` as indented JSON, whole or not at all; `options` as of json.dumps."""
  write_atomic(path, json.dumps(value, indent=2, **options) + "\n")


def append_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
  """Adds rows to a JSONL file, handed to the system before this returns."""
  with open(path, "ab") as file:
    file.write(b"".join(json_line(row) for row in rows))


def json_line(row: Mapping[str, Any]) -> bytes:
  """A row as a line of strict JSON; raises ValueError for a number that is not finite."""
  return (json.dumps(row, allow_nan=False) + "\n").encode()


def plain(value: Any) -> Any:
  """The value as JSON gives it back: tuples become lists, keys become strings."""
  return json.loads(json.dumps(value))


def parse(text: str | bytes) -> Any:
  """Reads a JSON text; ValueError for what is none, or is nested deeper than Python reads."""
  try:
    return json.loads(text)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None


def parse_object(line: str | bytes) -> dict[str, Any] | None:
  """The JSON object that a text holds, None where it holds none."""
  try:
    value = parse(line)
  except ValueError:
    return None
  return value if isinstance(value, dict) else None


def read_object(
  path: str | os.PathLike, way_out: str = "bring it back from a copy, or use a new --workdir"
) -> dict[str, Any]:
  """Reads the JSON object of a small file.

  Raises ValueError, naming the file and the way out, where it holds none.
  """
  try:
    value = parse(pathlib.Path(path).read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(
      f"{os.fspath(path)} is not JSON ({error}), so it is damaged; {way_out}"
    ) from error
  if not isinstance(value, dict):
    raise ValueError(f"{os.fspath(path)} is no JSON object, so it is damaged; {way_out}")
  return value


def find_object(path: str | os.PathLike) -> dict[str, Any] | None:
  """The JSON object that a file holds, None where there is no such file or it holds none."""
  try:
    return parse_object(pathlib.Path(path).read_bytes())
  except OSError:
    return None


def read_rows(path: str | os.PathLike) -> tuple[list[dict[str, Any]], int]:
  """Reads a JSONL file leniently: (its objects, the number of lines that are none).

  No file gives no rows.
  """
  path = pathlib.Path(path)
  lines = path.read_bytes().split(b"\n") if path.exists() else []
  parsed = [parse_object(line) for line in lines if line.strip()]
  rows = [row for row in parsed if row is not None]
  return rows, len(parsed) - len(rows)


def cut_torn_line(path: str | os.PathLike) -> None:
  """Removes what follows the last newline: nothing, unless a process died while writing."""
  path = pathlib.Path(path)
  if path.exists():
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
      with path.open("r+b") as file:
        file.truncate(data.rfind(b"\n") + 1)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested mappings to dotted keys: {"a": {"b": 1}} -> {"a.b": 1}; {} stays a value."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[f"{prefix}{key}"] = value
  return flat
