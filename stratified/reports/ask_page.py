"""A small page on this machine that puts questions to a policy and shows its whole rollouts.

It has no script: a question is a form, the answer the page that the form leads to. What was asked
lies in memory alone.
"""

import asyncio
import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from stratified.reports import text, transcripts

LONGEST_QUESTION = 2_000  # characters
_KEPT = 20  # rollouts that the page shows
_MOST_BYTES = 16 * LONGEST_QUESTION  # of a form: a character may take 12
# A page of another site must not reach this one under a name of its own.
_HOSTS = ["127.0.0.1", "localhost"]

Ask = Callable[[str], Mapping[str, Any]]


def make_app(title: str, ask: Ask, examples: Sequence[str] = ()) -> Starlette:
  """Makes the ASGI application.

  Args:
    title: what is asked, such as a run's folder and step.
    ask: question -> the record of its rollout; called by one thread at a time. ValueError says what
      is wrong with the question, RuntimeError what broke.
    examples: questions offered to a reader who has none.
  """
  asked: collections.deque = collections.deque(maxlen=_KEPT)
  turn = asyncio.Lock()

  def page(question: str = "", problem: str = "", status: int = 200) -> HTMLResponse:
    values = {"title": title, "question": question, "problem": problem, "examples": examples}
    views = [transcripts.view(record) for record in asked]
    shown = text.render("ask.html", values | {"views": views, "longest": LONGEST_QUESTION})
    return HTMLResponse(shown, status, {"Cache-Control": "no-store"})

  async def show(request: Request) -> Response:
    return page()

  async def put(request: Request) -> Response:
    question = await _question(request)
    if not question or len(question) > LONGEST_QUESTION:
      said = f"A question has 1 to {LONGEST_QUESTION:,} characters."
      return page(question[:LONGEST_QUESTION], said, 400)
    try:
      async with turn:
        asked.appendleft(await asyncio.to_thread(ask, question))
    except ValueError as error:
      return page(question, f"{error}", 400)
    except RuntimeError as error:
      return page(question, f"{error}", 502)
    return RedirectResponse("/", 303)

  return Starlette(
    routes=[Route("/", show), Route("/ask", put, methods=["POST"])],
    middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS, www_redirect=False)],
  )


async def _question(request: Request) -> str:
  """The form's question; of a form that is too long, more than a question may have."""
  body = b""
  async for part in request.stream():
    body += part
    if len(body) > _MOST_BYTES:
      return "…" * (LONGEST_QUESTION + 1)
  found = parse_qs(body.decode("utf-8", "replace"), max_num_fields=8)
  return " ".join(found.get("question", [""])[0].split())
