"""Random encoders of a few thousand parameters in Hugging Face's form, and their tokenizer."""

import json
import string

import numpy as np
import tokenizers

WORDS = (
  "the who wrote hamlet king band city of in river passage query poet tragedy english rock played "
  "by a an is was "
  "born capital france paris"
).split()
TEXTS = [
  "Who wrote Hamlet?",
  "",
  "the king",
  "a band played in the city of paris " * 3,
  "zyzzyva",
  "The Who are an English rock band; the poet was born in Paris. " * 5,
  "river",
  "x" * 200,
]


def wordpiece(max_length_in_file: int | None = None) -> tokenizers.Tokenizer:
  """BERT's kind of tokenizer; some models' files also hold padding and truncation: give a
  length."""
  pieces = [
    "[CLS]",
    "[PAD]",
    "[SEP]",
    "[UNK]",
    *WORDS,
    *string.ascii_lowercase,
    *(f"##{c}" for c in string.ascii_lowercase),
    *string.punctuation,
    *string.digits,
  ]
  vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
  tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
  )
  if max_length_in_file:
    tokenizer.enable_truncation(max_length_in_file)
    tokenizer.enable_padding(length=max_length_in_file)
  return tokenizer


def save(directory, kind: str = "bert", *, seed: int = 0, tokenizer=None, **sizes):
  """Writes a random encoder of `kind` ("bert" or "xlm-roberta"); returns transformers' model of
  it."""
  import torch
  import transformers

  tokenizer = tokenizer or wordpiece()
  fields = (
    dict(
      vocab_size=tokenizer.get_vocab_size(),
      hidden_size=32,
      num_hidden_layers=2,
      num_attention_heads=4,
      intermediate_size=64,
      max_position_embeddings=66,
      hidden_dropout_prob=0.0,
    )
    | sizes
  )
  torch.manual_seed(seed)
  if kind == "bert":
    model = transformers.BertModel(transformers.BertConfig(**fields)).eval()
  else:
    model = transformers.XLMRobertaModel(
      transformers.XLMRobertaConfig(
        pad_token_id=1, type_vocab_size=1, layer_norm_eps=1e-5, **fields
      )
    ).eval()
  with (
    torch.no_grad()
  ):  # the initial norms and biases are ones and zeros, which would hide a mistake in them
    for name, value in model.named_parameters():
      if value.ndim == 1:
        value.add_(0.1 * torch.randn_like(value))
      else:
        value.mul_(2)
  model.save_pretrained(directory)
  tokenizer.save(str(directory / "tokenizer.json"))
  return model


def reference(model, token_ids) -> np.ndarray:
  """transformers' last hidden states, averaged over the tokens of each text and normalised."""
  import torch

  rows = []
  for ids in token_ids:
    with torch.inference_mode():
      hidden = model(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)
      ).last_hidden_state[0]
    rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
  return np.stack(rows)


def edit_config(directory, **changes):
  path = directory / "config.json"
  raw = json.loads(path.read_text()) | changes
  path.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
