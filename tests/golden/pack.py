"""Packs the large files of the golden checkpoints, as the repository tracks them.

    python pack.py                  # X of each folder here → X.packed, if LARGE names X
    python pack.py NAME... OUT      # the checkpoints NAME, unpacked to OUT/NAME

A packed file is LZMA (`xz --format=lzma`) of the bytes at even places followed by those at odd
ones: the exponents of bfloat16 lie beside each other, and only they can be compressed. `golden` of
tests/common unpacks.
"""

import lzma
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LARGE = ["*.safetensors", "spiece.model", "sentencepiece.bpe.model"]
# A dictionary longer than any file, not the 64 MiB of preset 9, which a reader would allocate.
FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2 << 20}]


def pack(file):
    packed = Path(f"{file}.packed")
    if file.is_symlink():
        packed.symlink_to(f"{file.readlink()}.packed")
    else:
        content = file.read_bytes()
        planes = content[::2] + content[1::2]
        packed.write_bytes(lzma.compress(planes, format=lzma.FORMAT_ALONE, filters=FILTERS))
    file.unlink()


def unpacked(file):
    planes = lzma.decompress(file.read_bytes(), format=lzma.FORMAT_ALONE)
    content, half = bytearray(len(planes)), (len(planes) + 1) // 2
    content[::2], content[1::2] = planes[:half], planes[half:]
    return content


def unpack(name, out):
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in (HERE / name).iterdir():
        if file.suffix == ".packed":
            (folder / file.stem).write_bytes(unpacked(file))
        elif file.is_file():
            shutil.copyfile(file, folder / file.name)


if __name__ == "__main__":
    *names, out = sys.argv[1:] or [""]
    for name in names:
        unpack(name, Path(out))
    if not out:
        for large in LARGE:
            for file in sorted(HERE.glob(f"*/{large}")):
                pack(file)
