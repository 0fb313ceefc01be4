"""Compiles kernels/*.cu to kernels/ptx, which the program embeds; needs no GPU.

    pip install --no-deps -r kernels/requirements.txt
    python kernels/build_ptx.py            # makes what changed, prints its registers and spills
    python kernels/build_ptx.py --all      # makes everything
    python kernels/build_ptx.py --check    # makes everything and compares; exit code 1: it differs

A source becomes PTX, which every driver compiles for its GPU, and cubins: machine code for the
compute capabilities in CUBINS, which drivers load as it is. kernels/ptx/modules.rs is the table of
the files: the kernels of each, the digest of the sources that it was compiled from, and digests of
the PTX and the cubins.

After a merge or rebase that conflicts in kernels/ptx: resolve the sources, run this, and
`git add kernels/ptx`. The files and the table may be left as they are, markers of conflicts
included: what does not belong to the sources is made again.

NVRTC 12.0 makes PTX that every driver since 525 loads, and ptxas 12.9 cubins that they load: those
of ptxas 13 have an ELF version that only drivers since 580 know. A source in VARIANTS is compiled
again for newer devices: x.ptx.lzma has the PTX of each target, a zero byte behind it. ptxas
reports registers, local memory and shared memory for each of ARCHITECTURES. A kernel that spills is
an error, and so is one whose largest block would need more registers than a multiprocessor has.
Each file is compiled in its own process; together they take two minutes of one core.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import lzma
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
# and of integers, where 7.5 needs four; and copies go to shared memory by themselves.
VARIANTS = {"attention": [80], "attention_prompt": [80], "latent": [80], "matmul": [80],
            "matmul_halves": [80]}
ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
# Newer devices of the same major version run a cubin too: 8.9 that of 8.6, whose instructions are
# the same but in five kernels, 10.3 that of 10.0, 12.1 that of 12.0.
CUBINS = [75, 80, 86, 90, 100, 120]
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


def compress(content):
    """The format of `xz --format=lzma`, with the parameters that suit instructions of 16 bytes."""
    best = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA1, "preset": best, "lc": 0, "lp": 3, "pb": 3}]
    return lzma.compress(content, format=lzma.FORMAT_ALONE, filters=filters)


def content(file):
    """The content of a file; nothing if it is not there or broken."""
    try:
        return lzma.decompress(file.read_bytes(), format=lzma.FORMAT_ALONE)
    except (OSError, lzma.LZMAError):
        return b""


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class Module:
    """Makes PTX and cubins of a source for a target: lines of the table, and files' contents."""

    def __init__(self, source, target, ptx, cubins):
        self.ptx_file, self.ptx = PTX / f"{source.stem}.ptx.lzma", ptx.encode("utf-8")
        self.cubins = {}
        lines = [
            "    Module {",
            f'        source: "{source.stem}",',
            f"        compute: {target},",
            f'        digest: "{digest(source)}",',
            f'        ptx: "{sha256(self.ptx)}",',
            "        kernels: &[",
            *[f'            "{name}",' for name in threads_of(ptx)],
            "        ],",
            f'        lzma: include_bytes!("{self.ptx_file.name}"),',
            "        cubins: &[",
        ]
        for architecture, cubin in cubins.items():
            file = PTX / f"{source.stem}.sm_{architecture}.cubin.lzma"
            self.cubins[file] = cubin
            lines += [
                "            Cubin {",
                f"                compute: {architecture},",
                f'                sha256: "{sha256(cubin)}",',
                f'                lzma: include_bytes!("{file.name}"),',
                "            },",
            ]
        self.lines = [*lines, "        ],", "    },"]
        self.files = {self.ptx_file, *self.cubins}


def contents_of(made):
    """The files' contents. All targets of a source are made together: they have one digest."""
    contents = {}
    for (_, target), module in sorted(made.items(), key=lambda item: item[0]):
        contents.update(module.cubins)
        contents[module.ptx_file] = contents.get(module.ptx_file, b"") + module.ptx + b"\0"
    return contents


def head():
    """The first line of the table: with other compilers everything is made again."""
    pins = re.findall(r"==(.+)", (KERNELS / "requirements.txt").read_text("utf-8"))
    return f"// Written by kernels/build_ptx.py with NVRTC {pins[0]} and ptxas {pins[1]}."


def table(modules):
    """kernels/ptx/modules.rs, which src/backend/cuda/ptx.rs includes."""
    return "\n".join([head(), "&[", *[line for lines in modules for line in lines], "]", ""])


def kept(old):
    """The old table's lines of each (source, target) whose sources and files are still those
    that it was written for, and the files. Half a merge may have left it."""
    modules = {}
    if head() not in old:
        return modules
    for block in re.findall(r"^    Module \{\n.*?^    \},\n", old, re.M | re.S):
        if re.search(r"^[<=>]{7}", block, re.M):
            continue
        source = KERNELS / (re.search(r'source: "(\w+)"', block)[1] + ".cu")
        target = int(re.search(r"compute: (\d+)", block)[1])
        hashes = re.findall(r'(?:ptx|sha256): "(\w+)"', block)
        files = [PTX / name for name in re.findall(r'include_bytes!\("(.+)"\)', block)]
        is_whole = len(files) == len(hashes) == 1 + len(cubins_of(source, target))
        is_of = source.exists() and f'digest: "{digest(source)}"' in block
        if is_whole and is_of and target in targets(source):
            texts = content(files[0]).split(b"\0")
            at = targets(source).index(target)
            found = [*texts[at : at + 1], *map(content, files[1:])]
            if len(texts) == len(targets(source)) + 1 and [*map(sha256, found)] == hashes:
                modules[source, target] = (block.splitlines(), files)
    whole = lambda source: all((source, target) in modules for target in targets(source))
    return {job: module for job, module in modules.items() if whole(job[0])}


def usage(ptxas, ptx, architecture):
    """The cubin, and of each entry (kernel, registers, stack, spilled and shared bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.ptx"
        file.write_text(ptx, "utf-8")
        out = Path(folder) / "x.cubin"
        command = [ptxas, "-v", f"-arch=sm_{architecture}", file, "-o", out]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        cubin = out.read_bytes()
    rows = []
    for part in done.stderr.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        # Functions that were not inlined follow with their own figures: they are added.
        number = lambda pattern: sum(int(n) for n in re.findall(pattern, part))
        spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        registers = max(int(n) for n in re.findall(r"Used (\d+) registers", part))
        shared = number(r"(\d+) bytes smem")
        rows.append((name, registers, number(r"(\d+) bytes stack frame"), spilled, shared))
    return cubin, rows


def threads_of(ptx):
    """The largest block of each entry, in threads; 1024 if the entry states none."""
    entries = [part.split("{")[0] for part in ptx.split(".entry ")[1:]]
    bound = lambda entry: re.search(r"\.maxntid (\d+), 1, 1", entry)
    return {e.split("(")[0]: int(bound(e)[1]) if bound(e) else 1024 for e in entries}


def targets(source):
    """The compute capabilities that PTX is made for."""
    return [TARGET, *VARIANTS.get(source.stem, [])]


def devices(source, target):
    """The architectures that load the PTX for `target`: the newest that they can."""
    newest = lambda architecture: max(t for t in targets(source) if t <= architecture)
    return [a for a in ARCHITECTURES if newest(a) == target]


def cubins_of(source, target):
    return [a for a in devices(source, target) if a in CUBINS]


def build(job):
    """Makes a source for a target: the results, its kernels' rows, and what is wrong with them."""
    source, target = job
    ptx = tidy(Nvrtc().compile(source, target), source)
    threads, ptxas = threads_of(ptx), wheel("cuda_nvcc/bin/ptxas")
    cubins, rows, faults = {}, [], []
    for architecture in devices(source, target):
        cubin, figures = usage(ptxas, ptx, architecture)
        if architecture in CUBINS:
            cubins[architecture] = cubin
        for name, registers, stack, spilled, shared in figures:
            numbers = f"{registers:9} {stack:6} {spilled:8} {shared:7}"
            rows.append(f"{name:36} {target:6} {architecture:6} {numbers}")
            if spilled:
                faults.append(f"{name} of {target} spills {spilled} bytes on {architecture}")
            if threads[name] * (registers + 7 & ~7) > REGISTERS:
                what = f"{threads[name]} threads of {registers} registers"
                faults.append(f"{name} of {target} cannot have {what} on {architecture}")
    return Module(source, target, ptx, cubins), sorted(rows), faults


def work(jobs):
    """`build` of each job, the longest first, and what is wrong; prints the rows."""
    made, faults = {}, []
    length = lambda job: -sum(file.stat().st_size for file in sources_of(job[0]))
    jobs = sorted(jobs, key=length)
    print(f"{'kernel':36} {'target':6} {'sm':6} registers  stack  spilled  shared")
    # NVRTC numbers calls through all that a process compiles: each job has a process of its own.
    with ProcessPoolExecutor(max_tasks_per_child=1) as pool:
        for job, (module, rows, wrong) in zip(jobs, pool.map(build, jobs)):
            made[job] = module
            faults += wrong
            print(*rows, sep="\n")
    return made, faults


def write(made, files, text):
    """Writes what was made and the table, and removes files that are not in it."""
    PTX.mkdir(exist_ok=True)
    for file in set(PTX.iterdir()) - files - {TABLE}:
        file.unlink()
    contents = {f: c for f, c in contents_of(made).items() if content(f) != c}
    with ProcessPoolExecutor() as pool:
        for file, packed in zip(contents, pool.map(compress, contents.values())):
            file.write_bytes(packed)
    TABLE.write_text(text, "utf-8")


def differences(made, files, text):
    """The differences between the committed files and these."""
    again = "run kernels/build_ptx.py"
    strays = sorted(set(PTX.iterdir()) - files - {TABLE})
    faults = [f"{file.name} has no source: {again}" for file in strays]
    for file, now in contents_of(made).items():
        if content(file) != now:
            faults.append(f"{file.name} is not that of its source: {again}")
    if not TABLE.exists() or TABLE.read_text("utf-8") != text:
        faults.append(f"{TABLE.name} is not the table of these files: {again}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    parser.add_argument("--all", action="store_true", help="make what has not changed too")
    args = parser.parse_args()
    jobs = [(s, target) for s in sorted(KERNELS.glob("*.cu")) for target in targets(s)]
    old = TABLE.read_text("utf-8") if TABLE.exists() else ""
    old = {} if args.all or args.check else kept(old)
    made, faults = work([job for job in jobs if job not in old])
    text = table(made[job].lines if job in made else old[job][0] for job in jobs)
    files = {file for job in jobs for file in (made[job].files if job in made else old[job][1])}
    if args.check:
        faults += differences(made, files, text)
    else:
        write(made, files, text)
    sys.exit("\n".join(faults) if faults else 0)


if __name__ == "__main__":
    main()
