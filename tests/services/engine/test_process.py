"""No process of an engine outlives the one that hosts it."""

import subprocess

import psutil

from baton.services.engine import process
from harness.support import PYTHON, ROOT, eventually

# vLLM may fork its ranks, which then do not load plug-ins again. The child is busy forever, like a rank that
# waits for another one, so none of its threads can check anything.
HOST = """
import os, time
from baton.services.engine import process

process.lead_engine_processes()
child = os.fork()
if not child:
    while True:
        pass
print(child, flush=True)
time.sleep(60)
"""


def ended(rank):
    """Return whether a process has ended, even if its status was not collected."""
    return not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


def test_a_forked_rank_dies_with_its_engine():
    with subprocess.Popen([PYTHON, "-c", HOST], cwd=ROOT, stdout=subprocess.PIPE, text=True) as host:
        rank = psutil.Process(int(host.stdout.readline()))
        try:
            host.kill()
            eventually(lambda: ended(rank), 5, "it is gone")
        finally:
            if rank.is_running():
                rank.kill()


def test_a_zombie_counts_as_ended():
    """A rank that is forked while its engine is killed gets no signal, so it must check."""
    with subprocess.Popen([PYTHON, "-c", "import time; time.sleep(60)"]) as one:
        assert not process._ended(one.pid)
        one.kill()
        eventually(lambda: process._ended(one.pid), 5, "it is a zombie")
        one.wait()
        assert process._ended(one.pid)
