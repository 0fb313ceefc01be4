"""Expectations of an encoder-decoder model: a source text, 32 decoder positions, a translation.

The scripts of transformers 4 and 5 both use this.
"""

import dataclasses
import re

import numpy as np
import torch

from checkpoint import (
    EXPERT_MARGIN, LOGIT_MARGIN, MAX_DRAWS, PROMPTS, end_ids, greedy, logit_margin, write_ids)

DECODER_POSITIONS = 32
PARTS = ("encoder", "decoder")


@dataclasses.dataclass
class Run:
    logits: np.ndarray  # [decoder positions, vocab]
    # Per part int32 [layers, tokens, k]; -1 in dense layers and where an expert was full.
    experts: dict
    margin: float

    def dropped(self, part):
        """Tokens of the routing layers that an expert had no room for."""
        return sum(int((layer < 0).sum()) for layer in self.experts[part] if (layer >= 0).any())


class Reference:
    """Calling it with source and decoder ids gives a Run.

    `rule` takes a router's logits `[tokens, experts]` and what the router returned, and gives the
    chosen experts `[tokens, k]` and the smallest gap that decided.
    """

    def __init__(self, model, router, rule):
        self.model, self.rule = model.eval(), rule
        config = model.config
        # Either name of each count exists in one of the families.
        self.layers = {
            "encoder": config.num_hidden_layers,
            "decoder": getattr(config, "num_decoder_layers", None) or config.decoder_layers}
        routers = 0
        for name, module in model.named_modules():
            if type(module).__name__ == router:
                where = re.search(r"(encoder|decoder)\.(?:block|layers)\.(\d+)", name)
                part, layer = where.groups()
                module.register_forward_hook(self.hook(part, int(layer)))
                routers += 1
        assert routers, "no router of that name"

    def hook(self, part, layer):
        def look(router, args, output):
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            self.seen[part, layer], gap = self.rule(router.classifier(x), output)
            self.margin = min(self.margin, gap)

        return look

    def experts(self, part, tokens):
        k = next(iter(self.seen.values())).shape[1]
        chosen = np.full((self.layers[part], tokens, k), -1, dtype=np.int32)
        for (where, layer), experts in self.seen.items():
            if where == part:
                chosen[layer] = experts
        return chosen

    def __call__(self, source, target):
        self.seen, self.margin = {}, float("inf")
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target]),
                use_cache=False).logits[0]
        lengths = dict(zip(PARTS, (len(source), len(target))))
        experts = {part: self.experts(part, n) for part, n in lengths.items()}
        return Run(logits.numpy(), experts, self.margin)


def acceptable(run, needs_drops):
    """No near tie; only the encoder drops tokens, and does so where the expectation needs it.

    A decoder that runs one position at a time never fills an expert, one that runs all at once
    may: the expectations must not depend on that.
    """
    return (
        run.margin >= EXPERT_MARGIN and logit_margin(run.logits) >= LOGIT_MARGIN
        and run.dropped("decoder") == 0 and (run.dropped("encoder") > 0 or not needs_drops))


def writer(frame, start, drops_at=None):
    """`frame` puts a source's special ids around `n` random ids; `start` begins the decoder.

    The encoder must drop tokens in the prompt named `drops_at`.
    """

    def write(folder, checkpoint, reference, specials):
        out = folder / "expect"
        ordinary = [i for i in range(checkpoint.config["vocab_size"]) if i not in specials]
        ends = end_ids(checkpoint.config)
        report = {}
        for prompt, length in PROMPTS.items():
            rng = np.random.Generator(np.random.PCG64([checkpoint.seed, length]))
            for attempt in range(MAX_DRAWS):
                source = frame(rng, ordinary, length)
                rest = rng.choice(ordinary, size=DECODER_POSITIONS - len(start))
                target = [*start, *(int(i) for i in rest)]
                run = reference(source, target)
                if not acceptable(run, prompt == drops_at):
                    continue
                continuation = greedy(lambda ids: reference(source, ids), start, ends)
                if continuation is not None:
                    break
            else:
                raise SystemExit(f"{folder.name} {prompt}: every draw came near a tie")
            write_ids(out / f"{prompt}.tokens.json", source)
            write_ids(out / f"{prompt}.decoder_tokens.json", target)
            write_ids(out / f"{prompt}.greedy.json", continuation)
            np.save(out / f"{prompt}.logits.npy", run.logits.astype(np.float32))
            for part in PARTS:
                np.save(out / f"{prompt}.{part}_experts.npy", run.experts[part])
            report[prompt] = {
                "draws": attempt + 1, "expert_margin": round(run.margin, 6),
                "dropped": run.dropped("encoder"),
                "distinct_in_greedy": len(set(continuation)),
                "largest_logit": round(float(np.abs(run.logits).max()), 2)}
        return report

    return write
