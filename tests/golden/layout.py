"""Names and shapes that most released checkpoints share."""


def mlp(prefix, hidden, inner, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return {
        f"{prefix}.{gate}.weight": (inner, hidden),
        f"{prefix}.{up}.weight": (inner, hidden),
        f"{prefix}.{down}.weight": (hidden, inner),
    }


def experts(prefix, count, hidden, inner, names=("gate_proj", "up_proj", "down_proj")):
    shapes = {}
    for expert in range(count):
        shapes |= mlp(f"{prefix}.{expert}", hidden, inner, names)
    return shapes


def attention(prefix, config, biases=(), out_bias=False):
    """Grouped-query attention; `biases` lists the projections among q, k and v that have one."""
    hidden, heads, kv = (
        config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    dim = config.get("head_dim", hidden // heads)
    shapes = {}
    for name, rows in (("q", heads * dim), ("k", kv * dim), ("v", kv * dim)):
        shapes[f"{prefix}.{name}_proj.weight"] = (rows, hidden)
        if name in biases:
            shapes[f"{prefix}.{name}_proj.bias"] = (rows,)
    shapes[f"{prefix}.o_proj.weight"] = (hidden, heads * dim)
    if out_bias:
        shapes[f"{prefix}.o_proj.bias"] = (hidden,)
    return shapes


def norm(name, size, bias=False):
    return {f"{name}.weight": (size,)} | ({f"{name}.bias": (size,)} if bias else {})


def layer(prefix, config, number, self_attention, feed_forward, norm_bias=False):
    hidden = config["hidden_size"]
    return (
        norm(f"{prefix}.input_layernorm", hidden, norm_bias)
        | self_attention(f"{prefix}.self_attn", config, number)
        | norm(f"{prefix}.post_attention_layernorm", hidden, norm_bias)
        | feed_forward(prefix, config, number))


def decoder(config, self_attention, feed_forward, norm_bias=False):
    """A pre-norm decoder; the two functions take a prefix, the configuration and the layer."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        shapes |= layer(prefix, config, number, self_attention, feed_forward, norm_bias)
    shapes |= norm("model.norm", hidden, norm_bias)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 320,
    "bos_token_id": 314,
    "eos_token_id": 316,
    "torch_dtype": "bfloat16",
}


def next_token_layer(config, self_attention, feed_forward):
    """The multi-token prediction layer that a checkpoint stores behind its last one.

    The references here do not read it; `make_next_token.py` says what it gives.
    """
    hidden, vocab, number = (
        config[k] for k in ("hidden_size", "vocab_size", "num_hidden_layers"))
    prefix = f"model.layers.{number}"
    return layer(prefix, config, number, self_attention, feed_forward) | {
        f"{prefix}.embed_tokens.weight": (vocab, hidden),
        f"{prefix}.enorm.weight": (hidden,),
        f"{prefix}.hnorm.weight": (hidden,),
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}.shared_head.norm.weight": (hidden,),
        f"{prefix}.shared_head.head.weight": (vocab, hidden),
    }
