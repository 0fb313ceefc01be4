"""Compiles kernels/*.cu to kernels/ptx/*.ptx.gz, which the program embeds; needs no GPU.

    pip install --no-deps -r kernels/requirements.txt
    python kernels/build_ptx.py            # writes kernels/ptx, prints registers and spills
    python kernels/build_ptx.py --check    # compares instead of writing: exit code 1 if they differ

kernels/ptx/modules.rs is the table of the files: the kernels of each, and the digest of the
sources that it was compiled from.

NVRTC 12.0 makes PTX that every driver since 525 loads. A source in VARIANTS is compiled again for
newer devices, to x.sm_80.ptx.gz beside x.ptx.gz. ptxas of CUDA 13 reports registers, local memory
and shared memory for each of ARCHITECTURES. A kernel that spills is an error, and so is one whose
largest block would need more registers than a multiprocessor has. Each file is compiled in its own
process; together they take 90 seconds of one core.
"""

import argparse
import ctypes
import gzip
import hashlib
import importlib.util
import io
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
PTX = KERNELS / "ptx"
TABLE = PTX / "modules.rs"
# Compute capabilities, 75 for 7.5.
TARGET = 75
# From 8.0 on, one instruction multiplies two fragments of halves, where 7.5 needs two,
# and of integers, where 7.5 needs four.
VARIANTS = {"attention_prompt": [80], "matmul": [80]}
ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
# Registers of a multiprocessor of any of them; a warp takes a multiple of 8 for each thread.
REGISTERS = 65536
# Only fmaf() is a fused multiply-add. Divisions and roots are rounded correctly by default.
OPTIONS = ["--std=c++17", "--fmad=false", f"-I{KERNELS}"]


def wheel(inner):
    """The path of a file in one of NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else []:
        for found in sorted(Path(place).glob(inner)):
            return found
    sys.exit(f"no {inner} among the installed packages; see the first lines of this file")


class Nvrtc:
    def __init__(self):
        self.lib = ctypes.CDLL(str(wheel("cuda_nvrtc/lib/libnvrtc.so.12")))

    def text(self, program, what):
        """The program's log or PTX."""
        size = ctypes.c_size_t()
        getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self.lib, f"nvrtcGet{what}")(program, text)
        return text.value.decode()

    def compile(self, source, target):
        program = ctypes.c_void_p()
        name = source.name.encode()
        text = (parameter_lists(source) + source.read_text("utf-8")).encode()
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
    """The file and our headers that it includes, in the order of first use."""
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


def structs(text):
    """The fields of each struct XParams, one (type, name) a line: the parameters of kernels."""
    found = {}
    for name, body in re.findall(r"^struct (\w+Params) \{\n(.*?)^\};", text, re.M | re.S):
        lines = [line.split("//")[0].strip() for line in body.splitlines()]
        found[name] = [re.fullmatch(r"(.+) (\w+);", line).groups() for line in lines if line]
    return found


def parameter_lists(source):
    """The macros that KERNEL of cuda.cuh uses for the structs of a source and its headers."""
    lines = []
    for file in sources_of(source):
        for name, fields in structs(file.read_text("utf-8")).items():
            parameters = ", ".join(f"{kind} {field}" for kind, field in fields)
            lines.append(f"#define PARAMETERS_{name} {parameters}")
            lines.append(f"#define FIELDS_{name} {', '.join(field for _, field in fields)}")
    return "\n".join([*lines, f'#line 1 "{source.name}"', ""])


def digest(source):
    """The digest of a file and its headers; tests/gpu/ptx.rs computes the same."""
    hash = hashlib.sha256()
    for file in sources_of(source):
        hash.update(file.read_bytes())
    return hash.hexdigest()


def tidy(ptx, source):
    """Removes the compiler's own constants, which no kernel uses, and its comments around each line
    of `asm`."""
    noise = re.compile(r"\.global .*nv6target|\s*// (begin|end) inline asm")
    lines = [line for line in ptx.splitlines() if not noise.match(line)]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return f"// kernels/{source.name}\n{body}\n"


def compress(ptx):
    """gzip without a name and a time, so that equal PTX gives equal bytes."""
    out = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=out, mtime=0) as file:
        file.write(ptx.encode("utf-8"))
    return out.getvalue()


def table(modules):
    """kernels/ptx/modules.rs, which src/backend/cuda/ptx.rs includes."""
    lines = ["// Written by kernels/build_ptx.py.", "&["]
    for file, (source, target, ptx) in modules.items():
        lines += [
            "    Module {",
            f'        source: "{source.stem}",',
            f"        compute: {target},",
            f'        digest: "{digest(source)}",',
            "        kernels: &[",
            *[f'            "{name}",' for name in threads_of(ptx)],
            "        ],",
            f'        gzip: include_bytes!("{file.name}"),',
            "    },",
        ]
    return "\n".join([*lines, "]", ""])


def usage(ptxas, ptx, architecture):
    """(kernel, registers, stack bytes, spilled bytes, shared bytes) for each entry."""
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
        # Functions that were not inlined follow with their own figures: they are added.
        number = lambda pattern: sum(int(n) for n in re.findall(pattern, part))
        spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        registers = max(int(n) for n in re.findall(r"Used (\d+) registers", part))
        shared = number(r"(\d+) bytes smem")
        rows.append((name, registers, number(r"(\d+) bytes stack frame"), spilled, shared))
    return rows


def threads_of(ptx):
    """The largest block of each entry, in threads; 1024 if the entry states none."""
    entries = [part.split("{")[0] for part in ptx.split(".entry ")[1:]]
    bound = lambda entry: re.search(r"\.maxntid (\d+), 1, 1", entry)
    return {e.split("(")[0]: int(bound(e)[1]) if bound(e) else 1024 for e in entries}


def devices(targets, target):
    """The architectures that load the PTX for `target`: the newest that they can."""
    newest = lambda architecture: max(t for t in targets if t <= architecture)
    return [a for a in ARCHITECTURES if newest(a) == target]


def build(job):
    """A file's PTX for a target, the rows of the table, and what is wrong with its kernels."""
    source, target, architectures = job
    ptx = tidy(Nvrtc().compile(source, target), source)
    threads, ptxas = threads_of(ptx), wheel("*/bin/ptxas")
    rows, faults = [], []
    for architecture in architectures:
        for name, registers, stack, spilled, shared in usage(ptxas, ptx, architecture):
            numbers = f"{registers:9} {stack:6} {spilled:8} {shared:7}"
            rows.append(f"{name:36} {target:6} {architecture:6} {numbers}")
            if spilled:
                faults.append(f"{name} of {target} spills {spilled} bytes on {architecture}")
            if threads[name] * (registers + 7 & ~7) > REGISTERS:
                what = f"{threads[name]} threads of {registers} registers"
                faults.append(f"{name} of {target} cannot have {what} on {architecture}")
    return ptx, sorted(rows), faults


def write(modules, text):
    """Writes what changed, and removes files that have no source any more."""
    PTX.mkdir(exist_ok=True)
    for file in set(PTX.glob("*.ptx.gz")) - set(modules):
        file.unlink()
    for file, (_, _, ptx) in modules.items():
        if not file.exists() or gzip.decompress(file.read_bytes()).decode() != ptx:
            file.write_bytes(compress(ptx))
    TABLE.write_text(text, "utf-8")


def differences(modules, text):
    """The differences between the committed files and these."""
    strays = sorted(set(PTX.glob("*.ptx.gz")) - set(modules))
    faults = [f"{file.name} has no source" for file in strays]
    again = "run kernels/build_ptx.py without --check"
    for file, (source, _, ptx) in modules.items():
        if not file.exists() or gzip.decompress(file.read_bytes()).decode() != ptx:
            faults.append(f"{file.name} is not the PTX of {source.name}: {again}")
    if not TABLE.exists() or TABLE.read_text("utf-8") != text:
        faults.append(f"{TABLE.name} is not the table of these files: {again}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    check = parser.parse_args().check
    sources = sorted(KERNELS.glob("*.cu"))
    targets = lambda source: [TARGET, *VARIANTS.get(source.stem, [])]
    jobs = [(s, target, devices(targets(s), target)) for s in sources for target in targets(s)]
    modules, faults = {}, []
    print(f"{'kernel':36} {'target':6} {'sm':6} registers  stack  spilled  shared")
    with ProcessPoolExecutor() as pool:
        for (source, target, _), (ptx, rows, wrong) in zip(jobs, pool.map(build, jobs)):
            variant = "" if target == TARGET else f".sm_{target}"
            modules[PTX / f"{source.stem}{variant}.ptx.gz"] = (source, target, ptx)
            faults += wrong
            print("\n".join(rows))
    text = table(modules)
    if check:
        faults += differences(modules, text)
    else:
        write(modules, text)
    sys.exit("\n".join(faults) if faults else 0)


if __name__ == "__main__":
    main()
