"""A search engine of your own behind Search-R1's POST /retrieve, as a run asks for it.

    python examples/my_engine.py notes.txt &
    python experiments/train.py ... --config.retriever.name=http \\
      --config.retriever.url=http://127.0.0.1:8000

Replace what `search` does: call a database, a company's search, the web. Anything else that answers
POST /retrieve (docs/serving.md) will do as well, in whatever language.
"""

from collections.abc import Sequence
import pathlib
import sys

from stratified.retrieval import server
from stratified.retrieval.corpus import Passage


class Engine:
  """Searches the lines of a text file for the words of a query; each line is a passage.

  manifest: says what is searched; a run refuses to go on with another.
  """

  def __init__(self, path: str):
    self.lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    self.manifest = {"kind": "my_engine", "count": len(self.lines)}

  def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """At most `topk` passages for each query, the best first."""
    return [self.best(set(query.lower().split()), topk) for query in queries]

  def best(self, words: set[str], topk: int) -> list[Passage]:
    scores = {i: len(words & set(line.lower().split())) for i, line in enumerate(self.lines)}
    found = sorted((i for i in scores if scores[i]), key=lambda i: (-scores[i], i))[:topk]
    return [Passage(str(i), "", self.lines[i], float(scores[i])) for i in found]


if __name__ == "__main__":
  engine = Engine(sys.argv[1])
  server.serve(server.make_app(engine), server.bind("127.0.0.1", 8000))
