#!/usr/bin/env python3
"""Compare moeba with llama.cpp on one GGUF file. A developer's check; CI does not run it.

    python compare_llama_cpp.py MODEL.gguf TEXT.txt --moeba target/release/moeba

Needs numpy, gguf and llama-cpp-python. It asks two questions.

1. Does greedy decoding say the same? llama.cpp continues a few prompts cut from the text, and
   moeba reads each prompt with that continuation behind it: where its best id after every prefix
   is the next id of the continuation, it would have written the same.
2. Is a quantised file evaluated as well? The weights are dequantised into a float32 GGUF, whose
   next-token distributions over windows of the text are the reference, and both programs are
   measured by their mean divergence from it, KL(reference || program).
   moeba passes with a mean at most `--limit` times that of llama.cpp.

The reference is what moeba computes on the float32 file; how far llama.cpp is from it on the same
file is the first row of the table and has to be tiny against the others. Without `--moeba` the
reference is llama.cpp's, which tests this script and says what llama.cpp's settings cost.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import gguf
import llama_cpp
import numpy as np

PLAIN_TYPES = {gguf.GGMLQuantizationType.F32}
F32_CACHE = ["--cache-type-k", "f32", "--cache-type-v", "f32"]
GGML_F32 = int(gguf.GGMLQuantizationType.F32)


def has_only_f32(path):
    return all(t.tensor_type in PLAIN_TYPES for t in gguf.GGUFReader(path).tensors)


def write_f32_copy(source, target):
    """Copy a GGUF with every tensor dequantised to float32, one tensor in memory at a time."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        # The header's own fields and what the writer sets by itself must not come twice.
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = field.contents()
        if name == "general.file_type":
            value = int(gguf.LlamaFileType.ALL_F32)
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], inner)
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        count = int(np.prod(shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), count * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(n) for n in reversed(tensor.shape)]
        writer.write_tensor_data(values.astype(np.float32, copy=False).reshape(shape))
    writer.close()


class LlamaCpp:
    """llama.cpp on one file; every run starts from an empty cache."""

    def __init__(self, path, context, threads, cache_f32=False, flash=False, batch=512):
        cache = GGML_F32 if cache_f32 else None
        self.llm = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=batch, n_ubatch=batch, n_threads=threads,
            n_threads_batch=threads, logits_all=True, flash_attn=flash, type_k=cache,
            type_v=cache, verbose=False)

    def close(self):
        self.llm.close()

    def tokens(self, text):
        return self.llm.tokenize(text.encode(), add_bos=False, special=False)

    def bos(self):
        vocab = llama_cpp.llama_model_get_vocab(self.llm.model)
        adds = llama_cpp.llama_vocab_get_add_bos(vocab)
        return [llama_cpp.llama_vocab_bos(vocab)] if adds else []

    def logits(self, ids, step=None):
        """Logits of every position; with `step`, that many ids go through at a time."""
        self.llm.reset()
        for start in range(0, len(ids), step or len(ids)):
            self.llm.eval(ids[start : start + (step or len(ids))])
        return np.array(self.llm.scores[: len(ids)])

    def greedy(self, prompt, count):
        """The continuation, and by how much each of its ids led the next best one."""
        self.llm.reset()
        self.llm.eval(prompt)
        ids, leads = [], []
        for _ in range(count):
            last = self.llm.scores[self.llm.n_tokens - 1]
            second, first = np.sort(last)[-2:]
            ids.append(int(np.argmax(last)))
            leads.append(float(first - second))
            self.llm.eval(ids[-1:])
        return ids, leads


class Moeba:
    """The moeba binary; every run is a process of its own."""

    def __init__(self, binary, options):
        self.binary, self.options = binary, options

    def logits(self, path, ids, extra=()):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "logits.npy"
            listed = ",".join(str(i) for i in ids)
            command = [self.binary, "logits", str(path), "--tokens", listed, "-o", str(out)]
            done = subprocess.run([*command, *extra, *self.options], stdout=subprocess.DEVNULL)
            if done.returncode != 0:
                raise SystemExit(f"moeba failed on {path} with status {done.returncode}")
            logits = np.load(out)
        if logits.dtype != np.float32 or logits.shape[0] != len(ids):
            raise SystemExit(f"moeba wrote {logits.dtype} {logits.shape} for {len(ids)} ids")
        return logits


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def divergence(reference, other):
    """KL(reference || other) in nats at every position."""
    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=-1)


class Score:
    """The scores of one program, file and setting over all windows."""

    def __init__(self, label):
        self.label, self.kl, self.same_top, self.nll, self.worst = label, [], [], [], 0.0

    def add(self, reference, logits, ids):
        self.kl.extend(divergence(reference, logits))
        self.same_top.extend(reference.argmax(-1) == logits.argmax(-1))
        self.nll.extend(-log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]])
        self.worst = max(self.worst, float(np.abs(reference - logits).max()))

    def row(self):
        kl = np.array(self.kl)
        error = kl.std() / np.sqrt(len(kl))
        return (
            f"| {self.label} | {kl.mean():.3e} ± {error:.0e} | {np.quantile(kl, 0.99):.2e} | "
            f"{100 * np.mean(self.same_top):.2f} % | {np.exp(np.mean(self.nll)):.4f} | "
            f"{self.worst:.2e} |")

    def mean(self):
        return float(np.mean(self.kl))


def cut_windows(ids, bos, length, count):
    """Windows spread evenly over the text, each opened as the model expects a text to open."""
    body = length - len(bos)
    if len(ids) < body:
        raise SystemExit(f"the text has {len(ids)} tokens, one window needs {body}")
    count = min(count, len(ids) // body)
    starts = [i * ((len(ids) - body) // max(count - 1, 1)) for i in range(count)]
    return [bos + ids[s : s + body] for s in starts]


def check_greedy(args, peer, moeba, ids, bos):
    """Print the table of question 1; true when moeba never clearly disagrees."""
    lengths = [4, 16, 48, 96, 160][: args.prompts]
    step = max((len(ids) - max(lengths)) // len(lengths), 1)
    print("\n| Prompt | First difference | llama.cpp's lead there | moeba's lead there |")
    print("|---|---|---|---|")
    good = True
    for i, length in enumerate(lengths):
        prompt = bos + ids[i * step : i * step + length]
        continuation, leads = peer.greedy(prompt, args.greedy)
        if moeba is None:
            print(f"| {len(prompt)} ids | not run | smallest {min(leads):.3f} | |")
            continue
        logits = moeba.logits(args.model, prompt + continuation[:-1])[len(prompt) - 1 :]
        wrong = np.flatnonzero(logits.argmax(-1) != continuation)
        if len(wrong) == 0:
            print(f"| {len(prompt)} ids | none in {args.greedy} | smallest {min(leads):.3f} | |")
            continue
        at = int(wrong[0])
        lead = float(logits[at].max() - logits[at][continuation[at]])
        # Two roundings may order a near tie differently; a bug shows as a clear preference.
        clear = max(lead, leads[at]) > args.tie
        good &= not clear
        verdict = "**differs**" if clear else "near tie"
        print(f"| {len(prompt)} ids | id {at}: {verdict} | {leads[at]:.3f} | {lead:.3f} |")
    return good


def check_divergence(args, moeba, windows):
    """Print the table of question 2; true when moeba is within the limit."""
    folder = args.keep or pathlib.Path(tempfile.mkdtemp(prefix="compare-"))
    quantised = not has_only_f32(args.model)
    plain = folder / f"{args.model.stem}.f32.gguf" if quantised else args.model
    made = quantised and not plain.exists()
    if made:
        folder.mkdir(parents=True, exist_ok=True)
        write_f32_copy(args.model, plain)
    try:
        scores, ours, theirs = measure(args, moeba, windows, plain, quantised)
    finally:
        if made and args.keep is None:
            plain.unlink(missing_ok=True)
            folder.rmdir()
    author = "moeba" if moeba else "llama.cpp"
    print(f"\nReference: {author} on the float32 weights with a float32 cache, "
          f"{len(windows)} windows of {args.window} ids.\n")
    columns = "mean KL (nats)", "KL 99 %", "same best id", "perplexity", "largest logit gap"
    print(f"| Evaluated | {' | '.join(columns)} |\n|---|---|---|---|---|---|")
    for score in scores:
        print(score.row())
    if ours is None or not quantised:
        return True
    ratio = ours.mean() / theirs.mean()
    # The two err at the same hard positions, so only the paired difference says how sure this is.
    paired = np.array(ours.kl) - np.array(theirs.kl)
    error = paired.std() / np.sqrt(len(paired)) / theirs.mean()
    verdict = "pass" if ratio <= args.limit else "**fail**"
    print(f"\nmoeba / llama.cpp = {ratio:.3f} ± {error:.3f} (limit {args.limit}): {verdict}")
    return ratio <= args.limit


def measure(args, moeba, windows, plain, quantised):
    peer = LlamaCpp(plain, args.window, args.threads, cache_f32=True)
    peer_plain = [peer.logits(ids) for ids in windows]
    peer.close()
    reference = [moeba.logits(plain, ids, F32_CACHE) for ids in windows] if moeba else peer_plain
    scores = []

    def evaluate(label, run):
        score = Score(label)
        for ids, expected in zip(windows, reference):
            score.add(expected, run(ids), ids)
        scores.append(score)
        return score

    fixed = iter(peer_plain)
    evaluate("llama.cpp, float32 weights and cache", lambda _: next(fixed))
    if not quantised:
        return scores, None, None
    theirs = None
    settings = [
        ("flash attention off, f16 cache", {}),
        ("flash attention off, f32 cache", {"cache_f32": True}),
        ("flash attention on, f16 cache", {"flash": True}),
    ]
    for label, options in settings[:1] if args.brief else settings:
        peer = LlamaCpp(args.model, args.window, args.threads, **options)
        score = evaluate(f"llama.cpp, {label}", peer.logits)
        theirs = theirs or score
        if score is theirs and not args.brief:
            # Decoding one id at a time runs other kernels than a prompt does.
            evaluate("llama.cpp, the same one id at a time", lambda ids: peer.logits(ids, step=1))
        peer.close()
    ours = None
    if moeba:
        ours = evaluate("moeba, default cache", lambda ids: moeba.logits(args.model, ids))
        if not args.brief:
            evaluate("moeba, f32 cache", lambda ids: moeba.logits(args.model, ids, F32_CACHE))
    return scores, ours, theirs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, help="GGUF file")
    parser.add_argument("text", type=pathlib.Path, help="UTF-8 text to read")
    parser.add_argument("--moeba", help="path of the moeba binary")
    parser.add_argument("--moeba-args", default="", help="more arguments for every moeba run")
    parser.add_argument("--threads", type=int, default=2, help="threads of llama.cpp")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--greedy", type=int, default=24, help="ids to continue each prompt by")
    parser.add_argument("--tie", type=float, default=0.1, help="lead up to which ids may differ")
    parser.add_argument("--limit", type=float, default=1.1)
    parser.add_argument("--brief", action="store_true", help="question 2 in default settings only")
    parser.add_argument("--keep", type=pathlib.Path, help="folder to keep the float32 copy in")
    args = parser.parse_args()
    moeba = Moeba(args.moeba, args.moeba_args.split()) if args.moeba else None

    print(f"# {args.model.name}\n\nllama-cpp-python {llama_cpp.__version__}")
    peer = LlamaCpp(args.model, max(args.window, 160 + args.greedy + 8), args.threads)
    ids, bos = peer.tokens(args.text.read_text(encoding="utf-8")), peer.bos()
    good = args.brief or check_greedy(args, peer, moeba, ids, bos)
    peer.close()
    windows = cut_windows(ids, bos, args.window, args.windows)
    good &= check_divergence(args, moeba, windows)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
