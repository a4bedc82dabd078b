import mmap
import os
import subprocess
import sys

from memory import EngineMemory, engines_of, parse


def smaps(path):
    return f"""\
55d0a000-55d0b000 r-xp 00000000 fe:00 12 /usr/bin/python3
Size:                  8 kB
Rss:                   8 kB
Pss:                   2 kB
Pss_Dirty:             1 kB
7f00-7f10 r--p 00000000 fe:00 99                         {path}
Rss:                 100 kB
Pss:                  50 kB
7f20-7f30 rw-p 00000000 00:00 0
Rss:                  40 kB
Pss:                  40 kB
VmFlags: rd wr mr mw me ac
""".splitlines()


def test_the_mapped_weights_are_told_apart_from_the_rest(tmp_path):
    file = tmp_path / "weights" / "key.safetensors"
    file.parent.mkdir()
    file.write_bytes(bytes(102_400))
    assert parse(smaps(file)) == EngineMemory(
        rss=148 * 1024,
        pss=92 * 1024,
        weights_rss=100 * 1024,
        weights_pss=50 * 1024,
        weights_file=102_400,
    )


def test_a_process_without_weights_is_no_engine():
    assert parse(smaps("/usr/lib/libtorch.so")) is None


MAP = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(mapped[::4096])
print(flush=True)
sys.stdin.readline()
"""


def test_two_processes_share_the_pages_of_one_file(tmp_path):
    file = tmp_path / "weights" / "key.safetensors"
    file.parent.mkdir()
    file.write_bytes(os.urandom(64 * mmap.PAGESIZE))
    command = [sys.executable, "-c", MAP, str(file)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as two:
        one.stdout.readline(), two.stdout.readline()
        (first,), (second,) = engines_of(one.pid), engines_of(two.pid)
        one.stdin.close(), two.stdin.close()
    num_bytes = file.stat().st_size
    assert first.weights_file == first.weights_rss == second.weights_rss == num_bytes
    assert first.weights_pss + second.weights_pss == num_bytes
