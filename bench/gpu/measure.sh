#!/bin/bash
# What a run of one H100 or H200 is used for. Runs there, from the folder that carry.sh made:
#
#   bash .gpu/measure.sh A      is it right:  waits, kernels, whole models, memcheck          (one call, 9.5 minutes)
#   bash .gpu/measure.sh B      is it fast:   beside llama.cpp on one file, 100/50/25 % in VRAM (one call, 9.5 minutes)
#   bash .gpu/measure.sh C      why:          ncu by kernel, racecheck, a long decode            (one call, 9.5 minutes)
#
# A second argument makes a call shorter (seconds). Every step has a limit and the steps come by what they tell; a step that hangs is
# killed, said, and tried again in the ways that tell why. Results: $OUT/PHASE.log, .summary, .jsonl, .csv, .json.
set -uo pipefail
PHASE=${1:?A, B or C}; BUDGET=${2:-565}; HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-/tmp/out}; W=/tmp/moeba-gpu; mkdir -p "$OUT" "$W"
left() { echo $((BUDGET - SECONDS)); }
# step SECONDS NAME COMMAND...: its exit code; 124 is a hang.
step() {
    local most=$1 name=$2 room t rc; shift 2; room=$(left)
    if [ "$room" -lt 12 ]; then echo "== $name: no time left"; echo "SKIPPED $name" >> "$OUT/$PHASE.summary"; return 99; fi
    [ "$most" -gt "$room" ] && most=$room
    echo; echo "== $name: $*" | cut -c1-400; t=$SECONDS
    timeout -k 5 "$most" "$@"; rc=$?
    local word=ok; [ $rc -ne 0 ] && word=FAILED; [ $rc -eq 124 ] || [ $rc -eq 137 ] && word=HUNG
    echo "$word $name: exit code $rc, $((SECONDS - t)) s" | tee -a "$OUT/$PHASE.summary"
    return $rc
}
unxz_to() { if command -v xz > /dev/null; then xz -dc "$1"; else python3 -c 'import lzma,sys,shutil; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$1"; fi; }

setup() {
    command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1 || { echo "there is no NVIDIA driver here, or it finds no GPU: nothing to measure"; exit 3; }
    for d in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/local/cuda/lib64; do [ -d $d ] && export LD_LIBRARY_PATH=$d:${LD_LIBRARY_PATH:-}; done
    local cu13; cu13=$(find / -path '*/nvidia/cu13/lib/libcublas.so.13' -not -path '/proc/*' 2> /dev/null | head -1)
    [ -n "$cu13" ] && LLAMA_LIBS=$(dirname "$cu13") || LLAMA_LIBS=
    # PTX is compiled once a run, that of llama.cpp; moeba has machine code.
    export CUDA_CACHE_PATH=$W/cache CUDA_CACHE_MAXSIZE=4294967296 MOEBA_PROFILE=none
    [ -x $W/moeba ] || { unxz_to "$HERE/moeba.xz" > $W/moeba; chmod +x $W/moeba; }
    [ -d $W/llama ] || unxz_to "$HERE/llama.tar.xz" | tar xf - -C $W
    [ -x $W/probe ] || [ ! -f "$HERE/probe.xz" ] || { unxz_to "$HERE/probe.xz" > $W/probe; chmod +x $W/probe; }
    [ -x $W/probe ] || nvcc -O2 -std=c++17 -arch=sm_90 "$HERE/probe.cu" -o $W/probe -ldl || echo "FAILED to build the probe" >> "$OUT/$PHASE.summary"
    # The page cache or memory: 18 GB for the large model. Nothing is carried back.
    M=/tmp; [ "$(df --output=avail -k /dev/shm | tail -1)" -gt $((40 << 20)) ] && M=/dev/shm
    MOEBA=$W/moeba; TEXT=$HERE/text.txt; N=$(nproc)
}
llama() { LD_LIBRARY_PATH=$LLAMA_LIBS:${LD_LIBRARY_PATH:-} "$W/llama/llama-bench" "$@"; }
export -f llama
model() { local file=$M/$1.gguf; [ -s "$file" ] || step 120 "synth $1" "$MOEBA" synth "$2" --layers "$3" --type "$4" -o "$file"; }

facts() {
    nvidia-smi; nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.current,clocks.max.sm,clocks.max.mem --format=csv
    nproc; lscpu | grep -E 'Model name|Thread|Core|Socket|L3|Flags' | cut -c1-200; free -g; df -h / /dev/shm; nvcc --version | tail -2; ldd --version | head -1
    "$MOEBA" --version
}

phase_A() {
    facts
    # 1. Do the waits of src/forward/gpu/decode_pipeline hold on this driver? The one thing that no emulator can show.
    step 20 "waits" $W/probe hang 300
    for n in 1 2 32; do CUDA_DEVICE_MAX_CONNECTIONS=$n step 15 "waits, $n connections" $W/probe hang 100; done
    step 20 "copies behind the wait" $W/probe hang 300 copies
    CUDA_DEVICE_MAX_CONNECTIONS=1 step 15 "the same, 1 connection" $W/probe hang 100 copies
    # Graphs, waits, streams and a whole model, in a minute.
    step 120 "selftest --deep --quick" "$MOEBA" selftest --device cuda --deep --quick
    MOEBA_GPU_WAITS=0 step 60 "the same without waits" "$MOEBA" selftest --device cuda --deep --quick
    # 2. How long a start takes with machine code, and where the driver compiles the PTX: the log says "refuses the machine code".
    step 60 "selftest --quick" bash -c "time $MOEBA selftest --device cuda --quick"
    CUDA_FORCE_PTX_JIT=1 step 120 "selftest --quick, PTX, cold" bash -c "time $MOEBA selftest --device cuda --quick"
    CUDA_FORCE_PTX_JIT=1 step 60 "selftest --quick, PTX, warm" bash -c "time $MOEBA selftest --device cuda --quick > /dev/null"
    step 120 "selftest" "$MOEBA" selftest --device cuda
    step 60 "doctor" bash -c "$MOEBA doctor --device cuda --no-disk | tee $OUT/A.doctor.txt"
    # 3. Whole models: bits against the CPU's, prompt and decode, everything and a part in VRAM.
    model granite granite-3.0-1b-a400m 4 q4_k; model qwen3 qwen3-30b-a3b 4 q4_k_m; model dsv2 deepseek-v2-lite 4 q4_k_m; model oss gpt-oss-20b 4 mxfp4_moe
    local ids; ids=$(seq -s, 5 7 1000); head -c 12000 "$TEXT" > $W/text
    for m in granite qwen3 dsv2 oss; do
        [ -s $M/$m.gguf ] || continue
        local cache="-ctk f32 -ctv f32"
        step 60 "$m logits, CPU" "$MOEBA" logits $M/$m.gguf --tokens "$ids" -o $W/$m.cpu.npy --device cpu $cache
        for vram in 100% 40%; do
            step 60 "$m logits, $vram" "$MOEBA" logits $M/$m.gguf --tokens "$ids" -o $W/$m.npy --device cuda --vram $vram $cache \
                && { cmp $W/$m.cpu.npy $W/$m.npy && echo "SAME BITS $m $vram" || python3 - $W/$m.cpu.npy $W/$m.npy <<'P'
import numpy, sys
a, b = map(numpy.load, sys.argv[1:]); d = abs(a - b)
print("DIFFERENT", (d > 0).sum(), "of", a.size, "largest", d.max() / abs(a).max(), "first token", numpy.argwhere(d > 0)[0])
P
                } | tee -a "$OUT/A.summary"
        done
        step 60 "$m decode, CPU" "$MOEBA" perplexity $M/$m.gguf -f $W/text -c 128 --chunks 1 -b 1 --device cpu --stats $W/$m.cpu.json $cache
        for vram in 100% 40%; do
            if ! step 45 "$m decode, $vram" "$MOEBA" perplexity $M/$m.gguf -f $W/text -c 128 --chunks 1 -b 1 --device cuda --vram $vram --stats $W/$m.json $cache; then
                # Does it hang for the waits, or for the queues?
                MOEBA_GPU_WAITS=0 step 30 "$m decode, $vram, no waits" "$MOEBA" perplexity $M/$m.gguf -f $W/text -c 128 --chunks 1 -b 1 --device cuda --vram $vram $cache
                CUDA_DEVICE_MAX_CONNECTIONS=32 step 30 "$m decode, $vram, 32 connections" "$MOEBA" perplexity $M/$m.gguf -f $W/text -c 128 --chunks 1 -b 1 --device cuda --vram $vram $cache
            fi
            python3 - $W/$m.cpu.json $W/$m.json <<'P' | tee -a "$OUT/A.summary"
import json, sys
a, b = (json.load(open(f)) for f in sys.argv[1:]); k = [k for k in a if "perplexity" in k or "nll" in k]
print("decode", {x: (a[x], b.get(x)) for x in k}, "hit rate", b.get("hit_rate"), "ms", b.get("tpot_ms"))
P
        done
        # The same with the missing experts read in RAM, wherever that is possible.
        MOEBA_GPU_IN_PLACE=1 step 45 "$m decode, 40%, in place" "$MOEBA" perplexity $M/$m.gguf -f $W/text -c 128 --chunks 1 -b 1 --device cuda --vram 40% --ram 100% --io pread $cache
    done
    # 4. What memcheck says of every kernel.
    step 60 "probe rates" $W/probe
    command -v compute-sanitizer > /dev/null && step 240 "memcheck" compute-sanitizer --tool memcheck --error-exitcode 9 "$MOEBA" selftest --device cuda --quick
}

# Both engines in turn on one file: pp512, pp2048, tg128; then at a depth of 4096.
pair() {
    local share=$1 ncmoe=$2 file=$M/q3.gguf; shift 2
    echo "{\"label\": \"$share in VRAM, -ncmoe $ncmoe, $*\"}" >> "$OUT/B.jsonl"
    step 100 "moeba, $share in VRAM $*" bash -c "$MOEBA bench $file --device cuda --vram $share --no-machine -r 3 -o jsonl $* | tee -a $OUT/B.jsonl"
    step 100 "llama.cpp, -ncmoe $ncmoe $*" bash -c "llama -m $file -ngl 99 -ncmoe $ncmoe -fa on -r 3 -t $((N / 2)) -o jsonl $* | tee -a $OUT/B.jsonl"
}
phase_B() {
    export W LLAMA_LIBS
    facts | head -12
    step 60 "doctor" "$MOEBA" doctor --device cuda --no-disk
    model q3 qwen3-30b-a3b 48 q4_k
    # llama.cpp's PTX is compiled here, not in what is timed.
    step 120 "llama.cpp, first run" bash -c "llama -m $M/q3.gguf -ngl 99 -fa on -p 512 -n 8 -r 1"
    pair 100% 0 -p 512,2048 -n 128
    pair 50% 24 -p 512 -n 64
    pair 25% 36 -p 512 -n 64
    pair 100% 0 -p 0 -n 64 -d 4096
    echo '{"label": "100 %, layer by layer"}' >> "$OUT/B.jsonl"
    MOEBA_GPU_TOKEN_GRAPH=0 step 40 "moeba, 100 %, layer by layer" bash -c "$MOEBA bench $M/q3.gguf --device cuda --vram 100% --no-machine -r 3 -p 0 -n 128 -o jsonl | tee -a $OUT/B.jsonl"
    echo '{"label": "25 % by threads"}' >> "$OUT/B.jsonl"
    for t in 4 8 16; do step 40 "moeba, 25 %, $t threads" bash -c "$MOEBA bench $M/q3.gguf --device cuda --vram 25% --no-machine -r 2 -p 0 -n 32 -t $t -o jsonl | tee -a $OUT/B.jsonl"; done
    python3 - "$OUT/B.jsonl" <<'P' | tee -a "$OUT/B.summary"
import json, sys
for line in open(sys.argv[1]):
    try: r = json.loads(line)
    except ValueError: continue
    if "label" in r:
        print(r["label"])
        continue
    print(f"  {'moeba' if 'build_version' in r else 'llama':6} t{r.get('n_threads')} p{r.get('n_prompt')} n{r.get('n_gen')} d{r.get('n_depth')} {r.get('avg_ts'):9.1f} t/s  hit {r.get('hit_rate')}")
P
}

# A table by kernel out of ncu's CSV.
table() {
    python3 - "$1" <<'P'
import collections, csv, sys
rows = [l for l in open(sys.argv[1], errors="replace") if l.startswith('"')]
by = collections.defaultdict(lambda: collections.defaultdict(list))
for r in csv.DictReader(rows):
    try: by[r["Kernel Name"]][r["Metric Name"]].append(float(r["Metric Value"].replace(",", "")) * (1e-3 if r["Metric Unit"] in ("nsecond", "ns") else 1))
    except (ValueError, KeyError): pass
total = sum(sum(m.get("gpu__time_duration.sum", [])) for m in by.values())
print(f"{'kernel':34} {'n':>5} {'us each':>9} {'us all':>9} {'%':>5}  DRAM %  SM %  grid")
for k, m in sorted(by.items(), key=lambda x: -sum(x[1].get("gpu__time_duration.sum", [0]))):
    t = m.get("gpu__time_duration.sum", [0]); mean = lambda x: sum(m.get(x, [0])) / max(1, len(m.get(x, [0])))
    print(f"{k[:34]:34} {len(t):5} {sum(t)/len(t):9.2f} {sum(t):9.1f} {100*sum(t)/max(total,1e-9):5.1f}  {mean('dram__throughput.avg.pct_of_peak_sustained_elapsed'):6.1f} {mean('sm__throughput.avg.pct_of_peak_sustained_elapsed'):5.1f}  {mean('launch__grid_size'):.0f}")
P
}
phase_C() {
    model qwen3 qwen3-30b-a3b 4 q4_k
    local metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__throughput.avg.pct_of_peak_sustained_elapsed,launch__grid_size,launch__registers_per_thread
    local ncu="ncu --clock-control none --graph-profiling node --csv --metrics $metrics"
    # All experts in VRAM, which a prompt of 512 has brought there. With a part of them moeba sees the profiler and lets no
    # stream wait for the host: the order of the layers is another then.
    for test in "-p 0 -n 6 -d 512:420:260:decode" "-p 0 -n 6 -d 2048:1650:260:decode at 2048" "-p 512 -n 0:0:700:prompt"; do
        IFS=: read -r args skip count name <<< "$test"
        step 110 "ncu $name" bash -c "$ncu -s $skip -c $count $MOEBA bench $M/qwen3.gguf --device cuda --vram 100% --no-warmup --no-machine -r 1 $args > '$OUT/C.$(echo "$name" | tr -c 'a-z0-9\n' _).csv' 2> $W/ncu.err || tail -5 $W/ncu.err"
        table "$OUT/C.$(echo "$name" | tr -c 'a-z0-9\n' _).csv"
    done
    model granite granite-3.0-1b-a400m 24 q4_k
    step 90 "10,000 tokens at 30 %" "$MOEBA" bench $M/granite.gguf --device cuda --vram 30% --no-machine --no-warmup -r 1 -p 0 -n 10000
    command -v compute-sanitizer > /dev/null && step 150 "racecheck" compute-sanitizer --tool racecheck --error-exitcode 9 "$MOEBA" selftest --device cuda --quick
    command -v compute-sanitizer > /dev/null && step 100 "initcheck" compute-sanitizer --tool initcheck --error-exitcode 9 "$MOEBA" selftest --device cuda --quick
}

{ setup; echo "libraries of CUDA 13 for llama.cpp: ${LLAMA_LIBS:-none found}"; "phase_$PHASE"; echo; echo "==== $PHASE, $SECONDS s"; cat "$OUT/$PHASE.summary"; } 2>&1 | tee "$OUT/$PHASE.log"
