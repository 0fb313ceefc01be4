"""Compiles kernels/*.cu to kernels/ptx/*.ptx, which the program embeds; needs no GPU.

    pip install nvidia-cuda-nvrtc-cu12==12.0.76 nvidia-cuda-nvcc==13.0.88
    python kernels/build_ptx.py            # writes kernels/ptx, prints registers and spills
    python kernels/build_ptx.py --check    # compares instead of writing: exit code 1 if they differ

The oldest NVRTC 12 makes PTX that every driver since 525 loads. Registers, local memory and shared
memory are what ptxas of CUDA 13 says for each of ARCHITECTURES; a kernel that spills is an error.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
PTX = KERNELS / "ptx"
TARGET = "compute_75"
ARCHITECTURES = ["sm_75", "sm_86", "sm_90"]
# Sums are fused where a kernel says fmaf and nowhere else; divisions and roots are exact anyway.
OPTIONS = [f"--gpu-architecture={TARGET}", "--std=c++17", "--fmad=false", f"-I{KERNELS}"]


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

    def compile(self, source):
        program = ctypes.c_void_p()
        name = source.name.encode()
        text = source.read_bytes()
        self.lib.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
        options = [option.encode() for option in OPTIONS]
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
    """Without the compiler's own constants, which no kernel uses, and with the digest."""
    lines = [line for line in ptx.splitlines() if not re.match(r"\.global .*nv6target", line)]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return f"// kernels/{source.name}, sources sha256 {digest(source)}\n{body}\n"


def usage(ptxas, ptx, architecture):
    """(kernel, registers, stack bytes, spilled bytes, shared bytes) of each entry."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.ptx"
        file.write_text(ptx, "utf-8")
        command = [ptxas, "-v", f"-arch={architecture}", file, "-o", Path(folder) / "x.cubin"]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    check = parser.parse_args().check
    nvrtc, ptxas = Nvrtc(), wheel("*/bin/ptxas")
    faults = []
    sources = sorted(KERNELS.glob("*.cu"))
    made = {PTX / f"{source.stem}.ptx": tidy(nvrtc.compile(source), source) for source in sources}
    print(f"{'kernel':36} {'sm':6} registers  stack  spilled  shared")
    for ptx in made.values():
        rows = [(row, arch) for arch in ARCHITECTURES for row in usage(ptxas, ptx, arch)]
        for (name, registers, stack, spilled, shared), arch in sorted(rows):
            print(f"{name:36} {arch:6} {registers:9} {stack:6} {spilled:8} {shared:7}")
            if spilled:
                faults.append(f"{name} spills {spilled} bytes on {arch}")
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
