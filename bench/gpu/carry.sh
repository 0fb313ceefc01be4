#!/bin/bash
# Prepares, on the machine without a GPU, the folder that a run carries: moeba, llama.cpp with CUDA, a probe.
#
#   carry.sh CHECKOUT [MOEBA_BINARY]      default: CHECKOUT/target/release/moeba, built if it is not there
#
# Writes CHECKOUT/.gpu (kept out of git by .git/info/exclude) and prints its size. Takes about five minutes the first time;
# needs npm, pip, g++, python3, xz. measure.sh and probe.cu lie beside this file.
#
# llama.cpp v0.5.0 with CUDA 13 comes prebuilt in npm's @node-llama-cpp/linux-x64-cuda (glibc 2.34; libcudart.so.13 and
# libcublas.so.13, which PyTorch for CUDA 13 brings along), its source in npm's node-llama-cpp; llama-bench is compiled
# from that against those libraries.
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$1" && pwd)
BIN=${2:-$ROOT/target/release/moeba}
export ARCH=${ARCH:-90} ALL=${ALL:-}
VERSION=3.22.1
W=${WORK:-/tmp/gpu_carry}
OUT=$ROOT/.gpu
mkdir -p "$W" "$OUT"
grep -qx '/.gpu/' "$ROOT/.git/info/exclude" 2> /dev/null || echo '/.gpu/' >> "$ROOT/.git/info/exclude"
[ -x "$BIN" ] || (cd "$ROOT" && cargo build --release)

# moeba: a glibc binary (a static one could not load libcuda). Debian 12's needs glibc 2.34.
strip -o "$W/moeba" "$BIN" 2> /dev/null || cp "$BIN" "$W/moeba"
xz -T1 -2 -c "$W/moeba" > "$OUT/moeba.xz"

cd "$W"
[ -f cuda.tgz ] || mv "$(npm pack @node-llama-cpp/linux-x64-cuda@$VERSION 2> /dev/null | tail -1)" cuda.tgz
[ -f source.tgz ] || mv "$(npm pack node-llama-cpp@$VERSION 2> /dev/null | tail -1)" source.tgz
rm -rf package llama source
mkdir llama
tar xzf cuda.tgz
B=package/bins/linux-x64-cuda
cp $B/libggml-base.so $B/libggml.cuda.*.so $B/libllama.cuda.*.so $B/libllama-common.so llama/
cp $B/libggml-cpu-{sapphirerapids,icelake,zen4,haswell}.so llama/
tar xzf source.tgz package/llama/gitRelease.bundle
git clone -q package/llama/gitRelease.bundle source 2> /dev/null
(cd source && g++ -std=c++17 -O2 -DNDEBUG -Iinclude -Iggml/include -Icommon -Ivendor tools/llama-bench/llama-bench.cpp \
    tools/llama-bench/main.cpp -o ../llama/llama-bench -L../llama -l:libllama-common.so \
    -l:"$(basename ../llama/libllama.cuda.*)" -l:"$(basename ../llama/libggml.cuda.*)" -l:libggml-base.so \
    -Wl,-rpath,'$ORIGIN' -Wl,--allow-shlib-undefined -pthread -ldl)

# Of the seven architectures in libggml-cuda.so one stays; the others' room becomes zeros, which compress away. For 9.0
# the package has PTX of version 9.1 alone, which a driver of CUDA 13.0 (580) does not take: it is compiled here, by a
# ptxas that knows it, and put in its place (machine code of any CUDA 13 runs on any driver of CUDA 13). What this
# benchmark does not use stays out: products of other formats, heads of other sizes. ALL=1 compiles all.
[ -x venv/bin/pip ] || python3 -m venv venv
venv/bin/pip install -q --no-deps nvidia-cuda-nvcc==13.1.115 nvidia-cuda-cuobjdump 2> /dev/null
CU=$W/$(dirname "$(find venv -name ptxas | head -1)")
export CU
cat > fit.py << 'END'
"""fit.py prune LIBRARY ARCH OUT | fill LIBRARY FOLDER OUT: one architecture's images stay; then cubins take their places."""
import os
import struct
import sys

what, path, third, out = sys.argv[1:]
d = bytearray(open(path, "rb").read())
if what == "fill":
    for line in open(third + "/places"):
        number, pos, room = map(int, line.split())
        made = f"{third}/{number}.fatbin"
        image = open(made, "rb").read() if os.path.exists(made) else bytes(d[pos:pos + 8]) + bytes(8)
        assert len(image) <= room, (number, len(image), room)
        d[pos:pos + room] = image + bytes(room - len(image))
else:
    keep = int(third)
    shoff, = struct.unpack_from("<Q", d, 0x28)
    size, n, names = struct.unpack_from("<HHH", d, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", d, shoff + i * size) for i in range(n)]
    name = lambda s: d[sections[names][4] + s[0]:d.index(0, sections[names][4] + s[0])].decode()
    pos, length = next((s[4], s[5]) for s in sections if name(s) == ".nv_fatbin")
    end, number = pos + length, 0
    with open(os.path.join(os.path.dirname(out), "places"), "w") as places:
        while pos < end:
            if d[pos:pos + 4] != b"\x50\xed\x55\xba":
                pos += 8
                continue
            header, = struct.unpack_from("<H", d, pos + 6)
            n_bytes, = struct.unpack_from("<Q", d, pos + 8)
            entry, stop, some, number = pos + header, pos + header + n_bytes, bytearray(), number + 1
            while entry < stop:
                head, payload = struct.unpack_from("<IQ", d, entry + 4)
                if struct.unpack_from("<I", d, entry + 28)[0] == keep:
                    some += d[entry:entry + head + payload]
                entry += head + payload
            print(number, pos, stop - pos, file=places)
            d[pos + header:stop] = some + bytes(n_bytes - len(some))
            struct.pack_into("<Q", d, pos + 8, len(some))
            pos = stop
open(out, "wb").write(d)
END
mkdir -p ptx cubin
[ -s ptx/pruned.so ] || { python3 fit.py prune $B/libggml-cuda.so "$ARCH" ptx/pruned.so; (cd ptx && "$CU/cuobjdump" -xptx all pruned.so > /dev/null); }
one() { # A PTX file → cubin/N.fatbin, once.
    local n e
    n=$(basename "$1" | cut -d. -f2)
    [ -s "cubin/$n.fatbin" ] && return
    if [ -z "$ALL" ]; then
        e=$(grep -m1 -oE '\.entry _Z[A-Za-z0-9_]+' "$1" || true)
        case $e in
            *mul_mat_qIL9ggml_type12E* | *mul_mat_qIL9ggml_type14E* | *mul_mat_qIL9ggml_type8E* | *mul_mat_qIL9ggml_type39E*) ;;
            *mul_mat_qIL9ggml_type*) return ;;
            *flash_attn*ILi64E* | *flash_attn*ILi128E* | *flash_attn*ILi576E*) ;;
            *flash_attn*) return ;;
        esac
    fi
    nice -n 19 "$CU/ptxas" -arch=sm_$ARCH "$1" -o "cubin/$n.cubin" || return
    "$CU/fatbinary" --create="cubin/$n.fatbin" -64 --compress-all --image3=kind=elf,sm=$ARCH,file="cubin/$n.cubin"
    rm "cubin/$n.cubin"
}
export -f one
ls -S ptx/*.ptx | xargs -P "${JOBS:-2}" -I{} bash -c 'one {}'
cp ptx/places cubin/
python3 fit.py fill ptx/pruned.so cubin llama/libggml-cuda.so
echo "llama.cpp: $(ls cubin/*.fatbin | wc -l) of $(ls ptx/*.ptx | wc -l) modules compiled for sm_$ARCH"
tar cf - llama | xz -T1 -2 > "$OUT/llama.tar.xz"

cp "$HERE/measure.sh" "$HERE/probe.cu" "$OUT/"
cp "$ROOT/README.md" "$OUT/text.txt" # something to read for perplexity
[ "$(wc -c < "$OUT/text.txt")" -gt 12000 ] || head -c 40000 "$W/source/README.md" >> "$OUT/text.txt"
du -cb "$OUT"/* | sort -n
