"""A writer killed at any moment loses nothing but the entry it was writing.

``SPECDEC_KILLS=N`` kills N times instead of 6.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.checkpoints import PrefixCache

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("SPECDEC_KILLS", "6"))
LIMIT = 1 << 30
WRITER = """
    import sys
    import mlx.core as mx
    from mlx_lm.models.cache import ArraysCache
    from specdec.checkpoints import PrefixCache
    folder, first = sys.argv[1], int(sys.argv[2])
    with PrefixCache(1 << 30, folder) as cache:
        for n in range(first, first + 100_000):
            row = ArraysCache(2)
            block = mx.full((1, 2, 300 + n % 7 * 100, 64), n)
            row[0], row[1] = block, block + 0.5
            cache.put("ns", [n, n + 1], [row], None)
            cache.flush()
            print(n, cache.stats.written, flush=True)
"""


def killed_writer(folder: Path, first: int, seconds: float) -> list[int]:
    """The entries that a writer reported as finished before it was killed."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(first)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    lines = [writer.stdout.readline()]  # it is at work
    time.sleep(seconds)
    writer.send_signal(signal.SIGKILL)
    lines += writer.communicate()[0].splitlines(keepends=True)
    assert writer.returncode == -signal.SIGKILL
    whole = [line.split() for line in lines if line.endswith("\n")]
    assert all(int(written) == place + 1 for place, (_, written) in enumerate(whole))
    return [int(number) for number, _ in whole]


def test_a_killed_writer_loses_only_what_it_was_writing(tmp_path: Path) -> None:
    moments = random.Random(0)
    finished: list[int] = []
    leftovers = lost = different = 0
    for kill in range(KILLS):
        finished += killed_writer(tmp_path, kill * 100_000, moments.uniform(0, 0.25))
        temporary = [p for p in tmp_path.rglob("*") if ".tmp" in p.name]
        leftovers += len(temporary)
        assert len(temporary) <= 1  # the next writer has removed those before
        with PrefixCache(LIMIT, tmp_path) as cache:
            for number in finished:
                hit = cache.take("ns", [number, number + 1, 0], longest=2)
                if hit is None:
                    lost += 1
                    continue
                keys, values = hit.caches[0][0], hit.caches[0][1]
                shape = (1, 2, 300 + number % 7 * 100, 64)
                same = keys.shape == shape and mx.all(keys == number).item()
                different += not (same and mx.all(values == number + 0.5).item())
                # Not released: promoting everything to memory is not what is looked at.
            assert cache.stats.disk_errors == 0
    with PrefixCache(LIMIT, tmp_path) as cache:
        hits = sorted(cache.branch("ns", [number, number + 1]) for number in finished)
        assert hits == [2] * len(finished)
    print(
        f"{KILLS} kills, {len(finished)} entries finished, {leftovers} halves left behind, "
        f"{lost} lost, {different} different"
    )
    assert finished
    assert (lost, different) == (0, 0)
