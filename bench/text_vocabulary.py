#!/usr/bin/env python3
"""Copies a GGUF file that `moeba synth` made, with tokens that print as text.

    bench/text_vocabulary.py q3.gguf q3-text.gguf

Such a file has a vocabulary of bytes, filled up with tokens that print nothing: a server would
stream no text. In the copy they are normal tokens, which print as `[PAD300]`. Nothing moves, so the
rest of the file keeps its bytes.
"""

import shutil
import struct
import sys

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
NORMAL, CONTROL = 1, 3


def read(file, form):
    return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))


def skip_value(file, kind):
    if kind == STRING:
        file.seek(read(file, "Q")[0], 1)
    elif kind == ARRAY:
        item, n = read(file, "IQ")
        if item in SIZES:
            file.seek(n * SIZES[item], 1)
        else:
            for _ in range(n):
                skip_value(file, item)
    else:
        file.seek(SIZES[kind], 1)


def token_types(file):
    """Place and number of the vocabulary's token types."""
    magic, _, _, n_keys = read(file, "4sIQQ")
    if magic != b"GGUF":
        sys.exit("not a GGUF file")
    for _ in range(n_keys):
        key = file.read(read(file, "Q")[0])
        kind, = read(file, "I")
        if key == b"tokenizer.ggml.token_type":
            _, n = read(file, "IQ")
            return file.tell(), n
        skip_value(file, kind)
    sys.exit("the file has no token types")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    shutil.copyfile(sys.argv[1], sys.argv[2])
    with open(sys.argv[2], "r+b") as file:
        place, n = token_types(file)
        file.seek(place)
        types = list(read(file, f"{n}i"))
        types = [kind if kind == CONTROL else NORMAL for kind in types]
        file.seek(place)
        file.write(struct.pack(f"<{n}i", *types))


if __name__ == "__main__":
    main()
