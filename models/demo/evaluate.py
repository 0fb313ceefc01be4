#!/usr/bin/env python3
"""Held-out figures and samples of a finished run.

    python evaluate.py --data DATA_DIR --out RUN_DIR [--preset qwen3moe] [--tokens N]

Reads RUN_DIR/checkpoint.pt; prints one JSON object: loss per token, bits per byte and expert
loads (largest over mean, a layer each) for every kind of held-out text, over all of its tokens
unless --tokens limits them, in windows of 256 tokens that do not see each other.
"""
import argparse
import json
import os

import torch

import model as net
import train


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--preset", default="qwen3moe")
    parser.add_argument("--tokens", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = net.PRESETS[options.preset]
    shared = train.Shared(config, 1, 0)
    saved = torch.load(os.path.join(options.out, "checkpoint.pt"))
    shared.master.copy_(saved["master"])
    shared.weight.copy_(shared.master)
    model = train.shared_model(shared, config, 0)
    figures, loads = train.held_out(model, options.data, 256, options.tokens)
    for kind, load in loads.items():
        load = load.float()
        figures[kind]["max_over_mean"] = [round(v, 2) for v in
                                          (load.amax(1) / load.mean(1)).tolist()]
    print(json.dumps({"state": saved["state"], "held_out": figures}))


if __name__ == "__main__":
    main()
