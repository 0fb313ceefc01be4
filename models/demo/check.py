#!/usr/bin/env python3
"""Load an exported folder with transformers and compare its logits with train.py's own model.

    python check.py MODEL_DIR [--checkpoint RUN_DIR/checkpoint.pt --preset qwen3moe]

Prints the largest difference between the two float32 logits, the parameter count and a greedy
answer in chat form. Without --checkpoint only the loading and the answer are tried.
"""
import argparse
import types

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import model as net


def own_model(path, preset):
    """train.py's model in float32, with bfloat16-rounded weights as exported."""
    config = net.PRESETS[preset]
    model = net.Model(config)
    flat, at = torch.load(path)["master"], 0
    for parameter in model.p.values():
        size = parameter.numel()
        part = flat[at:at + size].bfloat16().float()
        parameter.data = part.view(parameter.shape).clone()
        at += size
    return model


def float_experts(x, chosen, weight, gate_up, down):
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for e, w in zip(chosen[token], weight[token]):
            out[token] += w * (down[e] @ net.gated(gate_up[e] @ x[token]))
    return out


def float_attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--checkpoint")
    parser.add_argument("--preset", default="qwen3moe")
    parser.add_argument("--question", default="What is a partition?")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, info = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=torch.float32, output_loading_info=True)
    print("loading", {k: len(v) for k, v in info.items() if hasattr(v, "__len__")})
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    with safe_open(f"{options.folder}/model.safetensors", "pt") as tensors:
        print("tensors", len(tensors.keys()), "parameters",
              sum(tensors.get_tensor(n).numel() for n in tensors.keys()))
    text = "The installer asks which partition should hold the system. You can change it later."
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        theirs = model(ids).logits
        if options.checkpoint:
            # the bfloat16 kernels are swapped for plain float32 ones for this comparison
            net.ExpertMix = types.SimpleNamespace(apply=float_experts)
            net.Attention = types.SimpleNamespace(apply=float_attention)
            ours = own_model(options.checkpoint, options.preset).logits(ids)
            print("largest logit difference", (ours - theirs).abs().max().item(),
                  "largest logit", theirs.abs().max().item())
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": options.question}],
                                           add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=80, do_sample=False, repetition_penalty=1.1)
    print(repr(tokenizer.decode(out[0])))


if __name__ == "__main__":
    main()
