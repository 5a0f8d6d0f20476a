"""What can go wrong with an SGLang server, by what is to be done about it."""


class SamplerError(RuntimeError):
  """The run has to stop, by a sentence. What was saved stays; the same command goes on."""


class Lost(Exception):
  """A server did not do what was asked: no connection, no answer in time, a 5xx, or nonsense.

  The work may be done elsewhere, and the server has to prove itself again before it is used.
  """


class Busy(Exception):
  """The server turned a request away for now (429 or 503); the same request may be sent again."""


class Refused(Exception):
  """The server answered 4xx or a failed operation: it works, and the request is wrong."""


class Stale(Exception):
  """Tokens came from other weights than those loaded: the server restarted or missed an update."""
