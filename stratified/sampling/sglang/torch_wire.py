"""Writes tensors as SGLang's `/update_weights_from_tensor` reads them, without PyTorch.

The route takes a pickle of [(name, tensor), ...], and a tensor in a pickle is

    torch._utils._rebuild_tensor_v2(
      torch.storage._load_from_bytes(B), offset, shape, strides, False, OrderedDict()
    )

where B is what torch.save writes for a storage: an uncompressed zip of the bytes and of a pickle
that describes them. Both pickles are put together here from their opcodes, so the trainer's
environment needs no PyTorch. Nothing is ever unpickled. Formats: PyTorch's serialization notes,
Python's pickletools.
"""

import base64
from collections.abc import Iterable
import io
import json
import pickle
import struct
import zipfile

import numpy as np

# NumPy's name of a dtype -> PyTorch's class for a storage of it.
STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "float16": "HalfStorage"}


def update_body(
  named: Iterable[tuple[str, np.ndarray]], *, ranks: int, weight_version: str | None
) -> bytes:
  """Makes the JSON body of /update_weights_from_tensor; each tensor-parallel rank takes its part.

  weight_version: the version that is complete with these tensors; None where more follow. The cache
  is flushed when the last have arrived.
  """
  payload = base64.b64encode(named_tensors(named)).decode()
  last = weight_version is not None
  return json.dumps(
    {"serialized_named_tensors": [payload] * ranks, "flush_cache": last}
    | ({"weight_version": weight_version} if last else {})
  ).encode()


def named_tensors(named: Iterable[tuple[str, np.ndarray]]) -> bytes:
  """Pickles the list of (name, tensor) pairs."""
  out = [pickle.PROTO, b"\x04", pickle.EMPTY_LIST, pickle.MARK]
  for name, value in named:
    out += [_text(name), *_tensor(value), pickle.TUPLE2]
  return b"".join([*out, pickle.APPENDS, pickle.STOP])


def _tensor(value: np.ndarray) -> list[bytes]:
  strides = np.cumprod([1, *value.shape[:0:-1]])[::-1] if value.ndim else []
  return [
    _global("torch._utils", "_rebuild_tensor_v2"),
    pickle.MARK,
    _global("torch.storage", "_load_from_bytes"),
    _bytes(_storage(value)),
    pickle.TUPLE1,
    pickle.REDUCE,
    _int(0),
    _ints(value.shape),
    _ints(strides),
    pickle.NEWFALSE,
    _global("collections", "OrderedDict"),
    pickle.EMPTY_TUPLE,
    pickle.REDUCE,
    pickle.TUPLE,
    pickle.REDUCE,
  ]


def _storage(value: np.ndarray) -> bytes:
  """Writes what torch.save writes for a storage on the CPU."""
  if value.dtype.name not in STORAGES:
    raise ValueError(
      f"a tensor of {value.dtype.name} can't be sent; choose one of {', '.join(STORAGES)}"
    )
  described = b"".join(
    [
      pickle.PROTO,
      b"\x02",
      pickle.MARK,
      _text("storage"),
      _global("torch", STORAGES[value.dtype.name]),
      _text("0"),
      _text("cpu"),
      _int(value.size),
      pickle.TUPLE,
      pickle.BINPERSID,
      pickle.STOP,
    ]
  )
  file = io.BytesIO()
  with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
    archive.writestr("archive/data.pkl", described)
    archive.writestr("archive/byteorder", b"little")
    with archive.open("archive/data/0", "w", force_zip64=value.nbytes >= 2**31) as entry:
      entry.write(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
    archive.writestr("archive/version", b"3\n")
  return file.getvalue()


def _global(module: str, name: str) -> bytes:
  return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
  data = value.encode()
  return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _bytes(value: bytes) -> bytes:
  return pickle.BINBYTES8 + struct.pack("<Q", len(value)) + value


def _int(value: int) -> bytes:
  return pickle.LONG1 + b"\x08" + struct.pack("<q", int(value))


def _ints(values) -> bytes:
  return b"".join([pickle.MARK, *map(_int, values), pickle.TUPLE])
