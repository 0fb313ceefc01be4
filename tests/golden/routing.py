"""Run a checkpoint with transformers in float32 and record what its routers choose.

A rule takes a router module and its logits `[tokens, experts]` and gives the scores that the
choice is made by (excluded experts at minus infinity) and the smallest gap of any earlier decision
such as that between groups. The choice itself is compared with what the module returned.
"""

import re

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from checkpoint import Run, text_config

logging.disable_progress_bar()
logging.set_verbosity_error()
INFINITY = float("inf")


def softmax(router, logits):
    """The best of a softmax; also right for a softmax over the chosen logits alone."""
    return torch.softmax(logits, dim=-1), INFINITY


def gap_below(scores, k):
    """By how much the k-th best of each row leads the next one."""
    if k >= scores.shape[-1]:
        return INFINITY
    ranked = scores.sort(dim=-1, descending=True).values
    return float((ranked[:, k - 1] - ranked[:, k]).min())


def keep_groups(scores, groups, best_of_group, kept):
    """Exclude the experts outside the `kept` groups of the highest score."""
    if kept >= groups:
        return scores, INFINITY
    per_group = scores.view(scores.shape[0], groups, -1)
    group_scores = per_group.topk(best_of_group, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool)
    chosen.scatter_(1, group_scores.topk(kept, dim=-1).indices, True)
    outside = ~chosen.unsqueeze(-1).expand(per_group.shape)
    masked = per_group.masked_fill(outside, -INFINITY).reshape(scores.shape)
    return masked, gap_below(group_scores, kept)


def grouped_softmax(router, logits):
    """DeepSeek-V2's group_limited_greedy: a group counts by its best expert."""
    scores = torch.softmax(logits, dim=-1)
    if router.topk_method == "greedy":
        return scores, INFINITY
    return keep_groups(scores, router.num_group, 1, router.topk_group)


def biased_sigmoid(router, logits):
    """DeepSeek-V3's noaux_tc: corrected scores choose, a group counts by its two best."""
    scores = logits.sigmoid() + router.e_score_correction_bias
    return keep_groups(scores, router.num_group, 2, router.topk_group)


def rank(scores, k):
    """Chosen experts, best first, and the smallest gap among the ranks up to the first left."""
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    gaps = ranked[:, :k] - ranked[:, 1 : k + 1] if k < scores.shape[1] else ranked.diff(dim=-1)
    return order[:, :k].numpy(), float(gaps.abs().min())


def check_loading(info, layers):
    """A misspelt tensor would only be initialised at random, so it must be an error here.

    Only the multi-token prediction layer, numbered behind the last, may stay unread.
    """
    behind = f"model.layers.{layers}."
    wrong = {k: [n for n in v if not str(n).startswith(behind)] for k, v in info.items() if v}
    wrong = {k: v for k, v in wrong.items() if v}
    if wrong:
        raise SystemExit(f"transformers did not load it completely: {wrong}")


class Reference:
    """Logits of every position and the chosen experts of every layer."""

    def __init__(self, folder, config, router=None, rule=softmax):
        self.model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        self.layers = text_config(config)["num_hidden_layers"]
        check_loading(info, self.layers)
        self.model.eval()
        self.rule, self.seen, self.margin = rule, {}, INFINITY
        routed = 0
        for name, module in self.model.named_modules():
            if router and type(module).__name__ == router:
                routed += 1
                layer = int(re.search(r"layers\.(\d+)\.", name).group(1))
                module.register_forward_hook(self.hook(layer))
        assert (routed > 0) == (router is not None), "no router of that name"

    def hook(self, layer):
        def look(router, args, output):
            x = args[0].reshape(-1, router.weight.shape[1]).float()
            logits = torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None))
            scores, margin = self.rule(router, logits)
            returned = next(o for o in output if o.dtype == torch.int64)
            self.seen[layer], gap = rank(scores, returned.shape[-1])
            self.margin = min(self.margin, margin, gap)
            same = np.sort(self.seen[layer]) == np.sort(returned.reshape(len(x), -1).numpy())
            assert same.all() or self.margin == 0, f"layer {layer}: the rule chooses otherwise"

        return look

    def experts(self, tokens):
        if not self.seen:
            return None
        k = next(iter(self.seen.values())).shape[1]
        chosen = np.full((self.layers, tokens, k), -1, dtype=np.int32)
        for layer, experts in self.seen.items():
            chosen[layer] = experts
        return chosen

    def __call__(self, ids):
        self.seen.clear()
        self.margin = INFINITY
        with torch.no_grad():
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return Run(logits.numpy(), self.experts(len(ids)), self.margin)
