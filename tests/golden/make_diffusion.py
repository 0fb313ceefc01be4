"""Texts that a model of masked tokens fills in, by the published loops of LLaDA and Dream.

    python make_diffusion.py PROGRAM       writes diffusion.json

PROGRAM MODEL OUT TOKENS... writes float32 [tokens, vocabulary], as for make_cards.py. Each step
keeps the tokens with the largest confidence: the probability of the best token, what it has before
the second, or minus the entropy of all. Packages: numpy, gguf.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import make_cards
import numpy as np

CARD = "llada-moe"
MASK = 255
PROMPT = [5, 42, 79, 116, 153]
N = 24
# Two float32 programs agree to about 1e-6 in a probability.
MARGIN = 1e-5
CASES = [
    {"steps": 12, "block_length": 8, "algorithm": "confidence"},
    {"steps": 6, "block_length": 24, "algorithm": "margin"},
    {"steps": 9, "block_length": 8, "algorithm": "entropy", "cfg_scale": 1.5},
    {"steps": 7, "eps": 1e-3, "algorithm": "confidence", "is_shifted": True},
]


def probabilities(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def confidence(p, algorithm):
    ordered = np.sort(p, axis=-1)
    if algorithm == "margin":
        return ordered[:, -1] - ordered[:, -2]
    if algorithm == "entropy":
        return (p * np.log(p + 1e-10)).sum(axis=-1)
    return ordered[:, -1]


def counts(case, n_masked, n_steps):
    """Tokens that each step of a block keeps."""
    if "eps" not in case:
        return [n_masked // n_steps + (step < n_masked % n_steps) for step in range(n_steps)]
    times = np.linspace(1, case["eps"], n_steps + 1)
    kept, left = [], n_masked
    for step, (t, s) in enumerate(zip(times, times[1:])):
        kept.append(left if step + 1 == n_steps else int(left * (1 - s / t)))
        left -= kept[-1]
    return kept


def fill_in(logits_of, case):
    text = np.array(PROMPT + [MASK] * N)
    length = case.get("block_length", N)
    n_steps = case["steps"] // (N // length)
    for start in range(len(PROMPT), len(text), length):
        block = np.arange(start, start + length)
        for n in counts(case, length, n_steps):
            logits = logits_of(text)
            if "cfg_scale" in case:
                blind = text.copy()
                blind[: len(PROMPT)] = MASK
                without = logits_of(blind)
                logits = without + (case["cfg_scale"] + 1) * (logits - without)
            if case.get("is_shifted"):
                logits = np.concatenate([logits[:1], logits[:-1]])
            masked = block[text[block] == MASK]
            p = probabilities(logits[masked].astype(np.float64))
            sure = confidence(p, case["algorithm"])
            order = np.argsort(-sure, kind="stable")
            if 0 < n < len(masked):
                assert sure[order[n - 1]] - sure[order[n]] > MARGIN, "another prompt is needed"
            chosen = order[:n]
            text[masked[chosen]] = p[chosen].argmax(axis=-1)
    return text[len(PROMPT) :].tolist()


def main(program):
    card = json.loads((make_cards.CARDS / f"{CARD}.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder, "model.gguf"), Path(folder, "logits")
        make_cards.write_gguf(CARD, card, model)

        def logits_of(text):
            subprocess.run([program, model, out, *map(str, text)], check=True)
            return np.fromfile(out, dtype=np.float32).reshape(len(text), -1)

        cases = [case | {"expected": fill_in(logits_of, case)} for case in CASES]
    found = {"mask": MASK, "prompt": PROMPT, "cases": cases}
    text = ",\n  ".join(json.dumps(case) for case in found.pop("cases"))
    head = json.dumps(found)[:-1]
    path = make_cards.HERE / "diffusion.json"
    path.write_text(f'{head}, "cases": [\n  {text}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1])
