"""A machine whose shared memory is too small for handoffs and whose disk has no room for logs."""

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from harness import zygote
from harness.deployment import MODEL_NAME, START_S, Process, deployment
from harness.greedy import GREEDY, token_ids
from harness.prompts import prompts
from harness.support import QUICK, eventually

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SHM_MIB = 4  # enough for the router's and the engine's files, but not for KV
LOG_KIB = 64


def run(arguments, log_dir):
    """Run `baton ARGUMENT ...` with its own /dev/shm and log folder. Called in the forked process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=%dm" % SHM_MIB),
        libc.mount(b"tmpfs", log_dir.encode(), b"tmpfs", 0, b"size=%dk" % LOG_KIB),
    ):
        if done != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    zygote.run_baton(arguments)


def answers(one):
    found = []
    with one.client() as client:
        for prompt in prompts()[:4]:
            done = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=24, **GREEDY)
            found.append(token_ids(done))
    return found


@pytest.mark.timeout(200)
def test_without_room_all_is_answered(one_pair, tmp_path):
    """The decode worker recomputes prompts."""
    logs = tmp_path / "logs"
    logs.mkdir()
    with deployment(tmp_path, constants=QUICK, router={"log_level": "debug"}) as one:
        line = ["up", "--config", str(one.config_file), "--log-dir", str(logs)]
        forked = zygote.shared().start("up", f"{__name__}:run", tmp_path, arguments=line, log_dir=str(logs))
        one.processes["up"] = Process("up", forked, forked.log)
        eventually(lambda: "mounted" in forked.text or forked.poll() is not None, 20, "it begins")
        if "mounted" not in forked.text:
            pytest.skip("cannot mount: " + forked.text.splitlines()[-1])
        eventually(lambda: "Ready." in forked.text or forked.poll() is not None, START_S, "it is ready")
        own = Path(f"/proc/{forked.pid}/root")  # its view of the files
        seen = own / logs.relative_to("/")
        assert "no more shared memory" in (seen / "prefill-0.log").read_text()
        with pytest.raises(OSError, match="No space left"), (seen / "fill").open("wb") as fill:
            fill.write(bytes(LOG_KIB << 10))
        assert shutil.disk_usage(seen).free == 0
        assert answers(one) == answers(one_pair)
        eventually(
            lambda: not any(worker.load.pinned_handoffs for worker in one.describe().workers),
            10,
            "no handoff is pinned",
        )
        assert one.processes["up"].end() == 0
