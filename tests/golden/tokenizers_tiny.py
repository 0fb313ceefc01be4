"""Tiny tokenizers in the file formats of the released models.

The byte-level ones carry the true pre-tokenizer pattern of their family, so splitting behaves as
in the released tokenizers although the merges are few. Every family also gets expect/text.json:
texts and the ids the reference tokenizer makes of them.
"""

import io
import json

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

# The patterns are data of the released tokenizers; a change of one character changes the ids.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# Also GLM-4's.
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")

# 256 bytes and these merges come to 314 ids, then the special tokens follow, and a few rows of
# the embedding stay without a token, as in the released Qwen models.
BYTE_LEVEL_SIZE = 314
SENTENCEPIECE_SIZE = 384
SPECIALS = {
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eot_id|>"],
    "glm4": [
        "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>",
        "<|user|>", "<|assistant|>", "<|observation|>"],
}

CORPUS = """\
The miller's boy carried seven sacks of barley across the bridge before the sun was up. He didn't
hurry, for the water was low and the wheel would not turn until noon. "We'll wait," said the old
miller, "and you'll learn to count the rings in this plank." There were 48 rings, then 112 in the
next, and nobody knew how many in the beam of 1731. They're older than the town, he thought, and
I'm only nine. So he sat down by the race and watched a heron that stood there as if it had been
paid for standing. When the rain came in the hills behind them, the stream began to rise; first it
was the colour of tea, then of clay, and then the wheel moved. The stones woke, the floor shook,
and flour fell like light from the beams on the boy and the man and the heron's empty place.
Der Müller lachte über das große Rad. Le garçon a répondu très vite: ça va déjà mieux, père!
Мельник сказал, что вода скоро будет здесь. 水が来た。河水上涨了。
for (int i = 0; i < 10; i++) { total += rings[i] * 3.14; }
"""

TEXTS = [
    "The boy counted 48 rings.",
    " a leading space, then  two, then   three",
    "tabs\tand\n\nnewlines \n  with spaces \r\n and a trailing one ",
    "I'm sure they'LL say we'Ve 12345 or 1731.50 reasons; don't!?",
    "Müller ça déjà naïve, Мельник: 水が来た",
    "e\u0301 combines, 🚀🦙 do not; \u00a0no break",
    "for (int i=0; i<10; i++) { x += a[i]; } // ------",
    "",
    " ",
    "\n",
    "x",
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def added(content):
    return {
        "content": content, "lstrip": False, "normalized": False, "rstrip": False,
        "single_word": False, "special": True}


def dump(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_texts(folder, encode, extra):
    out = folder / "expect"
    out.mkdir(exist_ok=True)
    dump(out / "text.json", [{"text": t, "ids": encode(t)} for t in TEXTS + extra])


def byte_level(folder, family):
    tokenizer = Tokenizer(models.BPE(ignore_merges=family == "llama3"))
    pattern = QWEN2_PATTERN if family == "qwen2" else LLAMA3_PATTERN
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_LEVEL_SIZE, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([CORPUS], trainer)
    specials = SPECIALS[family]
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    assert tokenizer.get_vocab_size() == BYTE_LEVEL_SIZE + len(specials)
    ids = {s: tokenizer.token_to_id(s) for s in specials}
    level = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.post_processor = level
    config = {
        "added_tokens_decoder": {str(i): added(s) for s, i in ids.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if family == "qwen2":
        config |= {
            "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
            "chat_template": CHATML, "eos_token": "<|im_end|>", "errors": "replace",
            "pad_token": "<|endoftext|>", "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer", "unk_token": None}
        extra = ["<|im_start|>user\nGo.<|im_end|>\n", "a<|endoftext|>b"]
    elif family == "glm4":
        config |= {
            "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "remove_space": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "tokenizer_class": "PreTrainedTokenizerFast"}
        extra = ["[gMASK]<sop><|user|>\nGo.<|assistant|>\n"]
    else:
        bos = specials[0]
        tokenizer.post_processor = processors.Sequence([level, processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, ids[bos])])])
        config |= {
            "bos_token": bos, "eos_token": "<|end_of_text|>",
            "model_input_names": ["input_ids", "attention_mask"],
            "tokenizer_class": "PreTrainedTokenizerFast"}
        extra = ["<|start_header_id|>user<|end_header_id|>\n\nGo.<|eot_id|>"]
    tokenizer.save(str(folder / "tokenizer.json"))
    dump(folder / "tokenizer_config.json", config)
    write_texts(folder, lambda text: tokenizer.encode(text).ids, extra)
    return set(ids.values())


def llama_sentencepiece(folder):
    model = io.BytesIO()
    # The normaliser does nothing and spaces are kept, as the Llama 2 and Mixtral models have it.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()), model_writer=model, model_type="bpe",
        vocab_size=SENTENCEPIECE_SIZE, byte_fallback=True, split_digits=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, character_coverage=0.995, unk_id=0, bos_id=1, eos_id=2,
        pad_id=-1, num_threads=1, minloglevel=2)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert processor.vocab_size() == SENTENCEPIECE_SIZE
    dump(folder / "tokenizer_config.json", {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(i): added(s) for i, s in enumerate(["<unk>", "<s>", "</s>"])},
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "legacy": True,
        "model_max_length": 512,
        "pad_token": None,
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
    })
    write_texts(folder, lambda text: [processor.bos_id(), *processor.encode(text)], [])
    return {0, 1, 2}


# T5's sentinels, of which <extra_id_0> has the last id.
EXTRA_IDS = 16
T5_SIZE = 190
# NLLB's pieces begin at 4 and its languages behind them, then comes the mask.
NLLB_SIZE = 380
LANGUAGES = ["ace_Arab", "deu_Latn", "eng_Latn", "fra_Latn", "rus_Cyrl"]


def train_pieces(model_type, size, **ids):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()), model_writer=model, model_type=model_type,
        vocab_size=size, normalization_rule_name="nmt_nfkc", character_coverage=0.995,
        num_threads=1, minloglevel=2, **ids)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert processor.vocab_size() == size
    return model.getvalue(), processor


def t5(folder):
    """Unigram pieces after nmt_nfkc, </s> appended; the sentinels follow the pieces."""
    model, processor = train_pieces(
        "unigram", T5_SIZE, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (folder / "spiece.model").write_bytes(model)
    sentinels = {T5_SIZE + i: f"<extra_id_{EXTRA_IDS - 1 - i}>" for i in range(EXTRA_IDS)}
    specials = {0: "<pad>", 1: "</s>", 2: "<unk>"} | sentinels
    dump(folder / "tokenizer_config.json", {
        "added_tokens_decoder": {str(i): added(s) for i, s in specials.items()},
        "additional_special_tokens": sorted(sentinels.values()),
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "extra_ids": EXTRA_IDS,
        "model_max_length": 512,
        "pad_token": "<pad>",
        "sp_model_kwargs": {},
        "tokenizer_class": "T5Tokenizer",
        "unk_token": "<unk>",
    })
    write_texts(folder, lambda text: [*processor.encode(text), 1], [])
    return set(specials)


def nllb(folder):
    """BPE pieces after nmt_nfkc, one id higher than in the model; the language before the text.

    The first ids are fairseq's <s>, <pad>, </s> and <unk>.
    """
    model, processor = train_pieces("bpe", NLLB_SIZE, unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    behind = [*LANGUAGES, "<mask>"]
    specials = dict(enumerate(["<s>", "<pad>", "</s>", "<unk>"]))
    specials |= {NLLB_SIZE + 1 + i: s for i, s in enumerate(behind)}
    dump(folder / "tokenizer_config.json", {
        "added_tokens_decoder": {str(i): added(s) for i, s in specials.items()},
        "additional_special_tokens": LANGUAGES,
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "cls_token": "<s>",
        "eos_token": "</s>",
        "legacy_behaviour": False,
        "mask_token": "<mask>",
        "model_max_length": 512,
        "pad_token": "<pad>",
        "sep_token": "</s>",
        "sp_model_kwargs": {},
        "src_lang": "eng_Latn",
        "tgt_lang": None,
        "tokenizer_class": "NllbTokenizer",
        "unk_token": "<unk>",
    })
    english = NLLB_SIZE + 1 + LANGUAGES.index("eng_Latn")

    def encode(text):
        pieces = [3 if i == 0 else i + 1 for i in processor.encode(text)]
        return [english, *pieces, 2]

    write_texts(folder, encode, [])
    return set(specials)


PIECES = {"sentencepiece": llama_sentencepiece, "t5": t5, "nllb": nllb}


def write(folder, family):
    """Write the tokenizer's files and give the ids of its special tokens."""
    for old in [*folder.glob("tokenizer*"), *folder.glob("*.model")]:
        old.unlink()
    return PIECES[family](folder) if family in PIECES else byte_level(folder, family)
