"""Run a tiny checkpoint with transformers in float32 and look at its routing."""

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()


def load(folder, **extra):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **extra)


def check_no_gaps_in_loading(folder):
    """A misspelt tensor would only be initialised at random, so it must be an error here."""
    _, info = load(folder, output_loading_info=True)
    wrong = {k: v for k, v in info.items() if v}
    if wrong:
        raise SystemExit(f"{folder.name}: transformers did not load it completely: {wrong}")


class Reference:
    """Logits of every position and, per layer, the router's probabilities (None where dense)."""

    def __init__(self, folder, config):
        self.model = load(folder).eval()
        self.top_k = config.get("num_experts_per_tok", 0)
        self.layers = config["num_hidden_layers"]
        self.seen = {}
        for name, module in self.model.named_modules():
            if name.endswith(".gate"):
                module.register_forward_pre_hook(self.router_hook(int(name.split(".")[2])))

    def router_hook(self, layer):
        # The probabilities are recomputed from the router's input because what the module itself
        # returns (logits, probabilities, only the chosen ones) is not the same in all versions.
        def hook(module, args):
            x = args[0].reshape(-1, module.weight.shape[1])
            logits = torch.nn.functional.linear(x, module.weight)
            self.seen[layer] = torch.softmax(logits, dim=-1).numpy()

        return hook

    def __call__(self, ids):
        self.seen.clear()
        with torch.no_grad():
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.numpy(), [self.seen.get(layer) for layer in range(self.layers)]


