#!/usr/bin/env python3
"""Tokenizer and token streams for train.py.

    python data.py CORPUS_DIR DATA_DIR

writes DATA_DIR/tokenizer.json, tokenizer_config.json, main.bin and chat.bin (uint16 tokens in
training order), and heldout_<kind>.bin and .txt with the byte counts in meta.json.
"""
import json
import os
import random
import re
import sys

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import SOURCES

VOCABULARY = 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The pattern published with Qwen2, so that readers of that family's files need nothing new.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
           r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def render(blocks):
    parts, previous = [], ""
    for kind, text in blocks:
        if kind[0] == "h":
            text = "#" * int(kind[1]) + " " + text
        elif kind == "li":
            text = "- " + text
        elif kind == "code":
            text = "```\n" + text + "\n```"
        parts.append(("\n" if kind == previous == "li" else "\n\n") + text)
        previous = kind
    return "".join(parts).strip() + "\n"


def train_tokenizer(texts, target):
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False,
                                           use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False, min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(os.path.join(target, "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False,
        "add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "unk_token": None, "model_max_length": 2048,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
        "additional_special_tokens": SPECIAL[1:],
        "added_tokens_decoder": {str(i): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": True} for i, token in enumerate(SPECIAL)},
    }
    with open(os.path.join(target, "tokenizer_config.json"), "w", encoding="utf-8") as out:
        json.dump(config, out, indent=2)
    return tokenizer


GENERIC = re.compile(r"^(see also|synopsis|options|name|description|notes?|examples?|author|bugs"
                     r"|files|introduction|overview|parameters|return value|errors|standards"
                     r"|history|conforming to|usage|contents|index|summary|warning|tip|details"
                     r"|versions|attributes|caution|important|and|or|the)\b", re.I)


def questions(heading, pick):
    """A user message made from a heading alone."""
    head = heading.rstrip(".:")
    if head.endswith("?"):
        return head
    low = head[0].lower() + head[1:] if len(head) > 1 and not head[1].isupper() else head
    gerund = re.match(r"^([A-Z]\w+ing) (.+)", head)
    if head.startswith("To "):
        return f"How do I {low[3:]}?"
    if gerund and " " not in gerund.group(1):
        return pick([f"Tell me about {low}.", f"Explain {low}.",
                     f"What should I know about {low}?"])
    if re.match(r"^How (to|do|can|does)\b", head):
        return head + "?" if not head.startswith("How to") else f"How do I {head[7:]}?"
    return pick([f"What is {head}?", f"What is {head}?", f"Explain {head}.",
                 f"Tell me about {head}.", f"Describe {head}."])


def chat_pairs(document, pick):
    """(question, answer) pairs: a heading, and the first text below it."""
    blocks = document["blocks"]
    for i, (kind, text) in enumerate(blocks):
        if kind[0] != "h" or GENERIC.match(text) or not 3 <= len(text) <= 60 \
                or not re.match(r"^[A-Z][\w .,'()/?-]+$", text):
            continue
        answer, size = [], 0
        for next_kind, next_text in blocks[i + 1:i + 8]:
            if next_kind not in ("p", "li") or size > 350 or size + len(next_text) > 800:
                break
            answer.append([next_kind, next_text])
            size += len(next_text)
        while answer and answer[-1][1].endswith(":"):
            size -= len(answer.pop()[1])
        if answer and answer[0][0] == "p" and size >= 80 and answer[0][1][0].isupper():
            yield questions(text, pick), render(answer).strip()


def main():
    corpus, target = sys.argv[1:3]
    os.makedirs(target, exist_ok=True)
    with open(os.path.join(corpus, "train.jsonl"), encoding="utf-8") as lines:
        documents = [json.loads(line) for line in lines]
    with open(os.path.join(corpus, "heldout.jsonl"), encoding="utf-8") as lines:
        held = [json.loads(line) for line in lines]
    tokenizer = train_tokenizer((render(d["blocks"]) for d in documents[::5]), target)
    repeat = {(s[0], s[1]): s[3] for s in SOURCES}
    rng = random.Random(20240607)

    encoded = []
    for a in range(0, len(documents), 512):
        texts = [render(d["blocks"]) for d in documents[a:a + 512]]
        encoded += [np.array(e.ids + [0], np.uint16) for e in tokenizer.encode_batch(texts)]
    order = []
    for i, document in enumerate(documents):
        copies = repeat[document["package"], document["kind"]]
        # copies of one document lie in different parts of the stream
        order += [((r + rng.random()) / copies, i) for r in range(copies)]
    order.sort()
    np.concatenate([encoded[i] for _, i in order]).tofile(os.path.join(target, "main.bin"))
    share = {}
    for _, i in order:
        kind = documents[i]["kind"]
        share[kind] = share.get(kind, 0) + len(encoded[i])

    start, end = 1, 2
    chats = []
    for document in documents:
        if document["kind"] == "code" or repeat[document["package"], document["kind"]] < 2:
            continue
        for question, answer in chat_pairs(document, rng.choice):
            ids = [start] + tokenizer.encode("user\n" + question).ids + [end]
            ids += tokenizer.encode("\n").ids + [start]
            ids += tokenizer.encode("assistant\n" + answer).ids + [end]
            chats.append(np.array(ids + tokenizer.encode("\n").ids + [0], np.uint16))
    rng.shuffle(chats)
    np.concatenate(chats).tofile(os.path.join(target, "chat.bin"))

    meta = {"train_tokens_by_kind": share, "chats": len(chats),
            "chat_tokens": int(sum(map(len, chats))), "unique_tokens": int(sum(map(len, encoded)))}
    for kind in ("prose", "reference", "code"):
        texts = [render(d["blocks"]) for d in held if d["kind"] == kind]
        with open(os.path.join(target, f"heldout_{kind}.txt"), "w", encoding="utf-8") as out:
            out.write(SPECIAL[0].join(texts))
        ids = [e.ids + [0] for e in tokenizer.encode_batch(texts)]
        np.concatenate([np.array(i, np.uint16) for i in ids]).tofile(
            os.path.join(target, f"heldout_{kind}.bin"))
        meta[f"heldout_{kind}"] = {"documents": len(texts), "tokens": sum(map(len, ids)),
                                   "bytes": sum(len(t.encode()) for t in texts)}
    with open(os.path.join(target, "meta.json"), "w", encoding="utf-8") as out:
        json.dump(meta, out, indent=1)
    print(json.dumps(meta))


if __name__ == "__main__":
    main()
