"""A tokenizer in three calls (encode, decode, end-of-text id), from a file or a list of pieces.

A list of pieces needs no download and no training. All 256 bytes are tokens too, so any text is
encoded, and decodes to itself.
"""

from collections.abc import Sequence
import dataclasses
import functools
import os
import re

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from stratified import files

END_OF_TEXT = "<|endoftext|>"


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A Hugging Face tokenizer behind the few calls that are used; it never adds a token to a text.

  backend: the `tokenizers.Tokenizer`. eos_id: the token that ends a text, also used for padding.
  other_ends: further tokens at which the model ends a text.
  """

  backend: tokenizers.Tokenizer
  eos_id: int
  other_ends: tuple[int, ...] = ()

  @functools.cached_property
  def begin_ids(self) -> tuple[int, ...]:
    """What the tokenizer itself puts in front of a text (Llama's BOS); nothing in most families."""
    bare = self.backend.encode("a", add_special_tokens=False).ids
    whole = self.backend.encode("a", add_special_tokens=True).ids
    starts = range(len(whole) - len(bare) + 1)
    return tuple(whole[: next((n for n in starts if whole[n : n + len(bare)] == bare), 0)])

  @property
  def vocab_size(self) -> int:
    return self.backend.get_vocab_size(with_added_tokens=True)

  def gaps(self, size: int) -> tuple[tuple[int, int], ...]:
    """The ids below `size` that are no token, as ranges [first, end): a vocabulary's padding."""
    ids = sorted(
      {id for id in self.backend.get_vocab(with_added_tokens=True).values() if id < size}
    )
    ends = zip([-1, *ids], [*ids, size])
    return tuple((before + 1, after) for before, after in ends if after > before + 1)

  def check_embedded(self, size: int) -> None:
    """Raises ValueError where a model of `size` embeddings has none for a token's id."""
    vocabulary = self.backend.get_vocab(with_added_tokens=True)
    beyond = sorted((id, token) for token, id in vocabulary.items() if id >= size)
    if beyond:
      raise ValueError(
        f"the tokenizer has {len(beyond)} token{'s' * (len(beyond) > 1)} without an embedding, "
        f"the first {beyond[0][1]!r} with the id {beyond[0][0]}, where the model has {size}; "
        "resize the model's embeddings, or bring tokenizer.json back as it came with the model"
      )

  def encode(self, text: str) -> list[int]:
    return self.backend.encode(text, add_special_tokens=False).ids

  def decode(self, token_ids: Sequence[int]) -> str:
    return self.backend.decode(list(token_ids), skip_special_tokens=False)

  def save(self, path: str | os.PathLike):
    self.backend.save(os.fspath(path))

  @classmethod
  def from_file(cls, path: str | os.PathLike, eos: str | None = None) -> "Tokenizer":
    """Reads a tokenizer.json; special tokens are found in text, as chat templates need.

    eos: the end-of-text token; by default the `eos_token` of the tokenizer_config.json beside the
    file, else the first of the usual ones that the vocabulary has.

    Raises FileNotFoundError where there is no file, ValueError where it has no such token.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
      raise FileNotFoundError(
        f"no tokenizer at {path}: expected a Hugging Face tokenizer.json there"
      )
    try:
      backend = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # it has no type of its own
      raise ValueError(
        f"{path} is damaged or cut short ({' '.join(str(error).split())[:200]}); copy or download "
        "it again"
      ) from error
    backend.no_padding()
    backend.no_truncation()
    candidates = _end_of_text_candidates(path) if eos is None else (eos,)
    for token in candidates:
      if backend.token_to_id(token) is not None:
        eos_id = backend.token_to_id(token)
        return cls(backend, eos_id, _other_ends(path, eos_id))
    raise ValueError(
      f"{path} has no end-of-text token among {', '.join(candidates)}: pass the right one as eos"
    )


def _end_of_text_candidates(path: str) -> tuple[str, ...]:
  config_path = os.path.join(os.path.dirname(path), "tokenizer_config.json")
  if os.path.exists(config_path):
    token = files.read_object(config_path, "copy or download it again").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and token:
      return (token,)
    if token:
      raise ValueError(
        f"{config_path} has eos_token={token!r}, which is no text; copy or download it again"
      )
  return ("<|im_end|>", END_OF_TEXT, "<|eot_id|>", "</s>")


def _other_ends(path: str, eos_id: int) -> tuple[int, ...]:
  """The end tokens that generation_config.json, beside the tokenizer, names besides `eos_id`."""
  stored = files.find_object(os.path.join(os.path.dirname(path), "generation_config.json")) or {}
  named = stored.get("eos_token_id")
  named = named if isinstance(named, list) else [named]
  is_id = lambda one: isinstance(one, int) and not isinstance(one, bool) and one >= 0
  return tuple(one for one in dict.fromkeys(named) if is_id(one) and one != eos_id)


def from_pieces(
  pieces: Sequence[str], fixed: Sequence[str] = (), patterns: Sequence[str] = ()
) -> Tokenizer:
  """Makes a tokenizer whose vocabulary is END_OF_TEXT, the pieces in their order, and the bytes.

  pieces: each lies within a tag, a word with the space before it, a white space or one other
    character, since no token crosses the border of these.
  fixed: strings, pieces among them, that are cut out first and may hold anything.
  patterns: regular expressions of what is cut out after them.
  """
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  spelled = [_byte_level(piece) for piece in pieces]
  # Unigram takes the segmentation of the highest total score: few pieces, and bytes where none
  # fits.
  vocabulary = [
    (END_OF_TEXT, 0.0),
    *((piece, -1.0) for piece in spelled),
    *((byte, -10.0) for byte in alphabet if byte not in spelled),
  ]
  cuts = "|".join(
    [r"</?[a-z]+>", *map(re.escape, fixed), *patterns, r" ?[A-Za-z]+", r"\s", r"[^\sA-Za-z]"]
  )
  backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=None, byte_fallback=False))
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(cuts), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([END_OF_TEXT])
  # A text that spells the end-of-text token must not end there. (A saved file does not keep this
  # setting.)
  backend.encode_special_tokens = True
  return Tokenizer(backend, backend.token_to_id(END_OF_TEXT))


def _byte_level(text: str) -> str:
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[
    0
  ][0]
