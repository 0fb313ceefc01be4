"""Compiles kernels/*.cu to kernels/ptx/*.ptx, which the program embeds; needs no GPU.

    pip install --no-deps -r kernels/requirements.txt
    python kernels/build_ptx.py            # writes kernels/ptx, prints registers and spills
    python kernels/build_ptx.py --check    # compares instead of writing: exit code 1 if they differ

The oldest NVRTC 12 makes PTX that every driver since 525 loads. What gains by it is made again
for newer devices (VARIANTS), x.sm_80.ptx beside x.ptx. Registers, local memory and shared
memory are what ptxas of CUDA 13 says for each of ARCHITECTURES; a kernel that spills is an error,
and so is one whose largest block would need more registers than a multiprocessor has. A file is
compiled by a process of its own: 70 seconds of one core together.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
PTX = KERNELS / "ptx"
# Compute capabilities, 75 for 7.5.
TARGET = 75
# From 8.0 on a product of two fragments of halves is one instruction; 7.5 takes two.
VARIANTS = {"attention_prompt": [80]}
ARCHITECTURES = [75, 86, 90]
# Of a multiprocessor of any of them; a warp takes a multiple of 8 for each thread.
REGISTERS = 65536
# Sums are fused where a kernel says fmaf and nowhere else; divisions and roots are exact anyway.
OPTIONS = ["--std=c++17", "--fmad=false", f"-I{KERNELS}"]


def wheel(inner):
    """A file of one of NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else []:
        for found in sorted(Path(place).glob(inner)):
            return found
    sys.exit(f"no {inner} among the installed packages; see the first lines of this file")


class Nvrtc:
    def __init__(self):
        self.lib = ctypes.CDLL(str(wheel("cuda_nvrtc/lib/libnvrtc.so.12")))

    def text(self, program, what):
        """What the program's log or its PTX says: a size, then so many bytes."""
        size = ctypes.c_size_t()
        getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self.lib, f"nvrtcGet{what}")(program, text)
        return text.value.decode()

    def compile(self, source, target):
        program = ctypes.c_void_p()
        name = source.name.encode()
        text = source.read_bytes()
        self.lib.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
        options = [f"--gpu-architecture=compute_{target}", *OPTIONS]
        options = [option.encode() for option in options]
        array = (ctypes.c_char_p * len(options))(*options)
        failed = self.lib.nvrtcCompileProgram(program, len(options), array)
        log = self.text(program, "ProgramLog").strip()
        if failed:
            sys.exit(f"{source.name}:\n{log}")
        if log:
            print(log, file=sys.stderr)
        ptx = self.text(program, "PTX")
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        return ptx


def sources_of(source):
    """The file and what it includes of ours, in the order of first use."""
    found, pending = [], [source]
    while pending:
        file = pending.pop(0)
        if file in found:
            continue
        found.append(file)
        for name in re.findall(r'^#include "([^"]+)"', file.read_text("utf-8"), re.M):
            near = [file.parent / name, KERNELS / name]
            near = [path.resolve() for path in near if path.exists()]
            if near and near[0].suffix == ".cuh":
                pending.append(near[0])
    return found


def digest(source):
    """Of what the PTX is made from; tests/kernels_ptx.rs computes the same."""
    hash = hashlib.sha256()
    for file in sources_of(source):
        hash.update(file.read_bytes())
    return hash.hexdigest()


def tidy(ptx, source):
    """Without the compiler's own constants, which no kernel uses, and its comments around each
    line of `asm`, but with the digest."""
    noise = re.compile(r"\.global .*nv6target|\s*// (begin|end) inline asm")
    lines = [line for line in ptx.splitlines() if not noise.match(line)]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return f"// kernels/{source.name}, sources sha256 {digest(source)}\n{body}\n"


def usage(ptxas, ptx, architecture):
    """(kernel, registers, stack bytes, spilled bytes, shared bytes) of each entry."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.ptx"
        file.write_text(ptx, "utf-8")
        command = [ptxas, "-v", f"-arch=sm_{architecture}", file, "-o", Path(folder) / "x.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    rows = []
    for part in done.stderr.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        # Functions that were not inlined follow with figures of their own: the sum counts.
        number = lambda pattern: sum(int(n) for n in re.findall(pattern, part))
        spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        registers = max(int(n) for n in re.findall(r"Used (\d+) registers", part))
        shared = number(r"(\d+) bytes smem")
        rows.append((name, registers, number(r"(\d+) bytes stack frame"), spilled, shared))
    return rows


def threads_of(ptx):
    """Threads that a block of each entry has at most; any block could have 1024."""
    entries = [part.split("{")[0] for part in ptx.split(".entry ")[1:]]
    bound = lambda entry: re.search(r"\.maxntid (\d+), 1, 1", entry)
    return {e.split("(")[0]: int(bound(e)[1]) if bound(e) else 1024 for e in entries}


def build(job):
    """A file's PTX for a target, the rows of the table, and what is wrong with its kernels."""
    source, target = job
    ptx = tidy(Nvrtc().compile(source, target), source)
    threads, ptxas = threads_of(ptx), wheel("*/bin/ptxas")
    rows, faults = [], []
    for architecture in [a for a in ARCHITECTURES if a >= target]:
        for name, registers, stack, spilled, shared in usage(ptxas, ptx, architecture):
            numbers = f"{registers:9} {stack:6} {spilled:8} {shared:7}"
            rows.append(f"{name:36} {target:6} {architecture:6} {numbers}")
            if spilled:
                faults.append(f"{name} of {target} spills {spilled} bytes on {architecture}")
            if threads[name] * (registers + 7 & ~7) > REGISTERS:
                what = f"{threads[name]} threads of {registers} registers"
                faults.append(f"{name} of {target} cannot have {what} on {architecture}")
    return ptx, sorted(rows), faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    check = parser.parse_args().check
    sources = sorted(KERNELS.glob("*.cu"))
    jobs = [(s, target) for s in sources for target in [TARGET, *VARIANTS.get(s.stem, [])]]
    made, faults = {}, []
    print(f"{'kernel':36} {'target':6} {'sm':6} registers  stack  spilled  shared")
    with ProcessPoolExecutor() as pool:
        for (source, target), (ptx, rows, wrong) in zip(jobs, pool.map(build, jobs)):
            variant = "" if target == TARGET else f".sm_{target}"
            made[PTX / f"{source.stem}{variant}.ptx"] = ptx
            faults += wrong
            print("\n".join(rows))
    if check:
        present = set(PTX.glob("*.ptx"))
        faults += [f"{file.name} has no source" for file in sorted(present - set(made))]
        for file, ptx in made.items():
            if not file.exists() or file.read_text("utf-8") != ptx:
                faults.append(f"{file.name} is not what its source gives: run this without --check")
    else:
        PTX.mkdir(exist_ok=True)
        for file in set(PTX.glob("*.ptx")) - set(made):
            file.unlink()
        for file, ptx in made.items():
            file.write_text(ptx, "utf-8")
    sys.exit("\n".join(faults) if faults else 0)


if __name__ == "__main__":
    main()
