"""A program goes on to its end, and writes its files, where nobody reads what it prints."""

import os
import subprocess
import sys

import pytest

from stratified.sampling.sglang.server import Server

PROGRAM = """
import os, sys
from stratified.progress import Progress
from stratified.runs import command_line

def main(_):
  with Progress(200, "steps", every_s=0) as progress, open(sys.argv[1], "w") as file:
    for step in range(200):
      print("a line that fills a pipe" * 40, flush=True)
      progress.update(1)
      os.write(2, b"native code\\n")
    file.write("all of it")

command_line.run(main, words=True)
"""


def start(path, **streams):
  return subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], **streams)


def test_readers_that_leave_end_no_program(tmp_path):
  """`2>&1 | head -1`"""
  process = start(tmp_path / "file", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  assert process.stdout.readline()
  process.stdout.close()
  assert process.wait(60) == 0
  assert (tmp_path / "file").read_text() == "all of it"


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_closed_streams_end_no_program_and_nothing_meant_for_them_gets_into_a_file(
  tmp_path, closed
):
  """`2>&-`: the next file that is opened would be number 2."""
  process = start(
    tmp_path / "file",
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    preexec_fn=lambda: [os.close(number) for number in closed],
  )
  assert process.wait(60) == 0
  assert (tmp_path / "file").read_text() == "all of it"


def test_a_server_s_password_is_in_no_message():
  server = Server("http://me:secret@127.0.0.1:9/v1/")
  assert server.url == "http://***@127.0.0.1:9/v1"
  assert server._client._name == "127.0.0.1:9" and server._client._prefix == "/v1"
