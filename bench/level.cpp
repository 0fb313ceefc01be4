// The side of llama.cpp in bench/level.py: makes random models and computes their logits.
//
//     level make META.gguf OUT.gguf SEED       the model of this metadata, with the tensors that
//                                              llama.cpp creates for it, saved by llama.cpp
//     level logits MODEL.gguf OUT TOKENS...    float32 [tokens, vocabulary], with an f32 cache
//     level steps MODEL.gguf OUT TOKENS...     the same, one token at a time

#include "ggml.h"
#include "gguf.h"
#include "llama.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

[[noreturn]] static void fail(const char * what) {
    fprintf(stderr, "level: %s\n", what);
    exit(1);
}

static uint64_t mixed(uint64_t n) {
    n += 0x9E3779B97F4A7C15u;
    n = (n ^ (n >> 30)) * 0xBF58476D1CE4E5B9u;
    n = (n ^ (n >> 27)) * 0x94D049BB133111EBu;
    return n ^ (n >> 31);
}

static bool contains(const std::string & text, const char * part) {
    return text.find(part) != std::string::npos;
}

// Values of a size that layers keep: norms around 1, rows of matrices of length 1.
static void fill(ggml_tensor * tensor, void * seed) {
    std::string name = ggml_get_name(tensor);
    uint64_t state = *static_cast<uint64_t *>(seed);
    for (char c : name) state = mixed(state ^ static_cast<uint8_t>(c));
    size_t n = ggml_nelements(tensor), n_rows = ggml_nrows(tensor);
    float centre = 0, width = std::sqrt(3.0f / static_cast<float>(tensor->ne[0]));
    if (contains(name, "ssm_a")) {
        centre = -0.3f, width = 0.25f;
    } else if (contains(name, "rope_freqs") || contains(name, "rope_factors")) {
        centre = 2.0f, width = 1.0f;
    } else if (n_rows == 1 || contains(name, "norm")) {
        centre = contains(name, "norm") ? 1.0f : 0.0f, width = contains(name, "norm") ? 0.5f : 0.25f;
    } else if (contains(name, "token_embd")) {
        width = 1.7f;
    }
    std::vector<uint8_t> bytes(ggml_nbytes(tensor));
    for (size_t i = 0; i < n; i++) {
        uint64_t drawn = mixed(state ^ i) >> 40;
        float value = centre + width * (static_cast<float>(drawn) / static_cast<float>(1 << 23) - 1.0f);
        if (tensor->type == GGML_TYPE_F32) {
            memcpy(bytes.data() + 4 * i, &value, 4);
        } else if (tensor->type == GGML_TYPE_I32) {
            int32_t id = static_cast<int32_t>(drawn % 8);
            memcpy(bytes.data() + 4 * i, &id, 4);
        } else {
            fail("a tensor that is neither F32 nor I32");
        }
    }
    memcpy(tensor->data, bytes.data(), bytes.size());
}

static llama_model_params on_cpu() {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    return params;
}

static int make(const char * metadata, const char * out, const char * seed_text) {
    gguf_init_params init = {true, nullptr};
    gguf_context * meta = gguf_init_from_file(metadata, init);
    if (!meta) fail("the metadata cannot be read");
    uint64_t seed = mixed(strtoull(seed_text, nullptr, 10));
    llama_model * model = llama_model_init_from_user(meta, fill, &seed, on_cpu());
    if (!model) fail("no model of this metadata");
    llama_model_save_to_file(model, out);
    return 0;
}

static int logits(const char * path, const char * out, bool steps, int n_tokens, char ** texts) {
    llama_model * model = llama_model_load_from_file(path, on_cpu());
    if (!model) fail("the model cannot be loaded");
    std::vector<llama_token> tokens;
    for (int i = 0; i < n_tokens; i++) tokens.push_back(atoi(texts[i]));
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = 2;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.swa_full = true;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) fail("no context");
    int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE * file = fopen(out, "wb");
    if (!file) fail("the output cannot be written");
    int n_at_once = steps ? 1 : n_tokens;
    llama_batch batch = llama_batch_init(n_at_once, 0, 1);
    for (int first = 0; first < n_tokens; first += n_at_once) {
        batch.n_tokens = n_at_once;
        for (int i = 0; i < n_at_once; i++) {
            batch.token[i] = tokens[first + i];
            batch.pos[i] = first + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        if (llama_decode(context, batch) != 0) fail("a batch cannot be computed");
        for (int i = 0; i < n_at_once; i++) {
            fwrite(llama_get_logits_ith(context, i), sizeof(float), n_vocab, file);
        }
    }
    return fclose(file) == 0 ? 0 : 1;
}

int main(int argc, char ** argv) {
    std::string mode = argc > 1 ? argv[1] : "";
    llama_backend_init();
    if (mode == "make" && argc == 5) return make(argv[2], argv[3], argv[4]);
    if ((mode == "logits" || mode == "steps") && argc > 4) {
        return logits(argv[2], argv[3], mode == "steps", argc - 4, argv + 4);
    }
    fail("make META OUT SEED, logits MODEL OUT TOKENS... or steps MODEL OUT TOKENS...");
}
