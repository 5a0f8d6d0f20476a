"""Downloads files: goes on where a download broke off, verifies a file before it gets its name.

It verifies what is known of a file: its size, a SHA-256 that the caller gives, and the hashes that
Hugging Face's hub sends in its headers (SHA-256 of large files, git's blob hash of small ones).

Written here because the sources are any http address (dataset servers, mirrors, one's own), which
huggingface_hub does not fetch, and files of several GB, which pooch starts again from the first
byte when a connection breaks.
"""

from collections.abc import Callable
import dataclasses
import hashlib
import http.client
import os
import pathlib
import time
import urllib.error
import urllib.parse
import urllib.request

from stratified import files

BLOCK = 2**20
# what a lost connection may raise; HTTPError is an OSError too
_BROKEN = (OSError, http.client.HTTPException)


@dataclasses.dataclass(frozen=True)
class Remote:
  """What a server says of a file before it is fetched; None where it does not say."""

  url: str
  etag: str | None = None
  size: int | None = None
  sha256: str | None = None
  git_sha1: str | None = None


def download(
  url: str,
  target: str | os.PathLike,
  *,
  sha256: str | None = None,
  attempts: int = 4,
  timeout_s: float = 60,
  wait_s: float = 1.0,
  progress: Callable[[int, int | None], None] | None = None,
) -> dict:
  """Brings `url` to `target` unless it is there already; returns {"url", "sha256", "bytes"}.

  Keeps a broken download as `target.part` and goes on with it, up to `attempts` times in this call
  and again in the next, as long as the server still has the same file (its ETag tells). progress is
  called with (bytes so far, bytes in all).

  Raises:
    ConnectionError: the server is out of reach or refuses; the message says why.
    ValueError: what came is not what was announced or asked for; it is deleted.
  """
  target = pathlib.Path(target)
  if not url.startswith(("http://", "https://")):
    raise ValueError(f"{url!r} is no http or https address")
  remote = _look(url, timeout_s)
  if sha256:
    remote = dataclasses.replace(remote, sha256=sha256)
  note = target.with_name(target.name + ".source.json")
  known = files.find_object(note) or {}
  if (
    target.exists()
    and known.get("url") == url
    and known.get("bytes") == target.stat().st_size
    and (remote.sha256 in (None, known.get("sha256")) and remote.etag in (None, known.get("etag")))
  ):
    return {name: known[name] for name in ("url", "sha256", "bytes")}
  target.parent.mkdir(parents=True, exist_ok=True)
  part = target.with_name(target.name + ".part")
  for attempt in range(attempts):
    try:
      _fetch(remote, part, timeout_s, progress)
      break
    except _BROKEN as error:
      status = getattr(error, "code", None)
      if (
        attempt + 1 == attempts
        or status is not None
        and 400 <= status < 500
        and status not in (408, 429)
      ):
        raise ConnectionError(_unreachable(url, error)) from error
      time.sleep(wait_s * 2**attempt)
  found = _check(remote, part)
  files.settle(part, target)
  part.with_name(part.name + ".json").unlink(missing_ok=True)
  files.write_json(note, found | {"etag": remote.etag})
  return found


def _look(url: str, timeout_s: float) -> Remote:
  """Asks for the headers at each redirection: the hub sends its own with the first answer only."""
  known, at = {}, url
  for _ in range(8):
    try:
      reply = _OPENER.open(
        urllib.request.Request(at, method="HEAD", headers=_HEADERS), timeout=timeout_s
      )
    except urllib.error.HTTPError as error:
      if error.code in (403, 405, 501) and not known:
        return Remote(url)  # a server without HEAD, or an address signed for GET alone
      if not 300 <= error.code < 400:
        raise ConnectionError(_unreachable(url, error)) from error
      reply = error
    except _BROKEN as error:
      raise ConnectionError(_unreachable(url, error)) from error
    with reply:
      headers, status = reply.headers, reply.status
    for name in ("X-Linked-Etag", "X-Linked-Size", "X-Repo-Commit"):
      if headers.get(name):
        known.setdefault(name, headers[name])
    if not 300 <= status < 400:
      return _remote(url, known, headers)
    at = urllib.parse.urljoin(at, headers.get("Location", ""))
    if not at.startswith(("http://", "https://")):
      break
  raise ConnectionError(f"{url} redirects without end or out of http: get the file by hand")


def _remote(url: str, known: dict, headers) -> Remote:
  etag = headers.get("ETag")
  linked = (known.get("X-Linked-Etag") or etag or "").strip('"')
  size = known.get("X-Linked-Size") or headers.get("Content-Length")
  is_hash = lambda length: len(linked) == length and set(linked) <= set("0123456789abcdef")
  hub = "X-Repo-Commit" in known
  return Remote(
    url,
    etag,
    int(size) if size and size.isdigit() else None,
    linked if is_hash(64) and "X-Linked-Etag" in known else None,
    linked if is_hash(40) and hub else None,
  )


def _fetch(remote: Remote, part: pathlib.Path, timeout_s: float, progress) -> None:
  """Appends what the part lacks; starts anew for another file, or a server without ranges."""
  note = part.with_name(part.name + ".json")
  strong = remote.etag is not None and not remote.etag.startswith("W/")
  begun = (
    part.stat().st_size
    if part.exists()
    and strong
    and (files.find_object(note) or {}) == {"url": remote.url, "etag": remote.etag}
    else 0
  )
  if begun and begun == remote.size:
    return
  headers = _HEADERS | ({"Range": f"bytes={begun}-", "If-Range": remote.etag} if begun else {})
  files.write_json(note, {"url": remote.url, "etag": remote.etag})
  try:
    reply = urllib.request.urlopen(
      urllib.request.Request(remote.url, headers=headers), timeout=timeout_s
    )
  except urllib.error.HTTPError as error:
    if error.code == 416:  # the part is longer than the file: it is of another one
      part.unlink()
    raise
  with reply:
    goes_on = reply.status == 206 and (reply.headers.get("Content-Range") or "").startswith(
      f"bytes {begun}-"
    )
    length = reply.headers.get("Content-Length")
    expected = int(length) if length and length.isdigit() else None
    done = begun if goes_on else 0
    total = remote.size if expected is None else done + expected
    with part.open("ab" if goes_on else "wb") as file:
      while block := reply.read(BLOCK):
        file.write(block)
        done += len(block)
        if progress:
          progress(done, total)
  if total is not None and done < total:
    raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")


def _check(remote: Remote, part: pathlib.Path) -> dict:
  size = part.stat().st_size
  sha256, git = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode())
  with part.open("rb") as file:
    while block := file.read(BLOCK):
      sha256.update(block)
      git.update(block)
  for what, wanted, found in (
    ("bytes", remote.size, size),
    ("SHA-256", remote.sha256, sha256.hexdigest()),
    ("git hash", remote.git_sha1, git.hexdigest()),
  ):
    if wanted is not None and wanted != found:
      part.unlink()
      raise ValueError(
        f"{remote.url}: {what} {found} came, but {wanted} was expected; it has been deleted: run "
        "the "
        "command again, or take the file from another place"
      )
  return {"url": remote.url, "sha256": sha256.hexdigest(), "bytes": size}


def _unreachable(url: str, error: Exception) -> str:
  reason = (
    f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.HTTPError)
    else (getattr(error, "reason", None) or error or type(error).__name__)
  )
  return f"{url} can't be fetched ({reason})"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
  def redirect_request(self, *unused):
    return None


_OPENER = urllib.request.build_opener(_NoRedirect)
# No compression on the way: sizes, ranges and hashes are those of the file.
_HEADERS = {"User-Agent": "stratified-prepare-data", "Accept-Encoding": "identity"}
