// The C interface of the CPU kernels. Plain data in, a status code out; nothing here knows Python, torch or C++ types.
//
// Every function returns fp_status and, when it is not FP_OK, leaves one sentence in `err` that names the argument, its value
// and the limit. Handles are opaque and used by one thread at a time; the pool is the only thing that has threads of its own.
#pragma once
#include <stdint.h>

#define FP_API extern "C" __attribute__((visibility("default")))

enum fp_status { FP_OK = 0, FP_INVALID = 1, FP_MEMORY = 2, FP_UNSUPPORTED = 3, FP_INTERNAL = 4 };
enum { FP_PAGE_SIZE = 16, FP_MAX_GROUPS = 2, FP_MAX_ROPES = 2, FP_ERROR_BYTES = 256 };

struct fp_error {
    char text[FP_ERROR_BYTES];
};

struct fp_pool;
struct fp_model;

// Which products run: `FP_CHECK` multiplies float activations by dequantised weights, slowly, to prove everything but rounding.
enum fp_variant { FP_AUTO = 0, FP_AVX2 = 1, FP_AVX512_VNNI = 2, FP_CHECK = 3 };
enum fp_activation { FP_SILU = 0, FP_GELU_TANH = 1 };

// What a tensor is for. Layer -1 for the first four.
enum fp_role {
    FP_TOKEN_EMBEDDING = 0,  // [vocab_size, hidden]; also the output layer when FP_OUTPUT is never set
    FP_OUTPUT = 1,           // [vocab_size, hidden]
    FP_OUTPUT_NORM = 2,      // [hidden] f32
    FP_ROPE_FACTORS = 3,     // [head_dim / 2] f32: divides the inverse frequencies of rope 0
    FP_ATTN_NORM = 4,        // [hidden] f32
    FP_Q = 5,                // [q_heads * head_dim, hidden]
    FP_K = 6,                // [kv_heads * head_dim, hidden]
    FP_V = 7,                // [kv_heads * head_dim, hidden]
    FP_O = 8,                // [hidden, q_heads * head_dim]
    FP_Q_BIAS = 9,           // f32, optional, as the two below
    FP_K_BIAS = 10,
    FP_V_BIAS = 11,
    FP_FFN_NORM = 12,        // [hidden] f32
    FP_GATE = 13,            // [ffn, hidden]
    FP_UP = 14,              // [ffn, hidden]
    FP_DOWN = 15,            // [hidden, ffn]
    FP_Q_NORM = 16,          // [head_dim] f32, optional, as the three below
    FP_K_NORM = 17,
    FP_POST_ATTN_NORM = 18,  // [hidden] f32: normalises the attention block's output before the residual sum
    FP_POST_FFN_NORM = 19,
    FP_NUM_ROLES = 20
};

struct fp_layer_spec {
    int32_t group;   // sub-pool whose pages it uses
    int32_t window;  // sliding window in tokens, 0: all earlier tokens
    int32_t rope;    // which rope base
};

struct fp_model_spec {
    int32_t num_layers, hidden_size, num_q_heads, num_kv_heads, head_dim, ffn_size, vocab_size;
    int32_t max_context;          // positions below this
    int32_t max_tokens;           // tokens of one step
    int32_t max_rows;             // rows of one step
    int32_t rope_interleaved;     // 1: pairs (2i, 2i+1); 0: pairs (i, i + head_dim / 2)
    int32_t activation;           // fp_activation
    int32_t variant;              // fp_variant
    int32_t num_groups;
    int32_t num_pages[FP_MAX_GROUPS];  // the sink (page 0) included
    float rope_theta[FP_MAX_ROPES];
    float rms_epsilon;
    float embedding_scale;
    float attention_scale;        // multiplies q
    const fp_layer_spec* layers;  // [num_layers]
};

// Pages of one sub-pool, row by row.
struct fp_pages {
    const int32_t* kv_indptr;        // [num_rows + 1], first 0
    const int32_t* kv_indices;       // [kv_indptr[num_rows]]
    const int32_t* start_positions;  // [num_rows]: position of the first slot of the first listed page; null: all 0
    const int64_t* out_cache_loc;    // [num_tokens]: page * 16 + offset; a slot of page 0 is not written
};

struct fp_step {
    int32_t num_rows, num_tokens, num_out;
    const int32_t* input_ids;    // [num_tokens]
    const int64_t* positions;    // [num_tokens]
    const int32_t* qo_indptr;    // [num_rows + 1]: row r computes tokens qo_indptr[r] .. qo_indptr[r + 1]
    const int32_t* seq_lens;     // [num_rows], this step's tokens included
    fp_pages pages[FP_MAX_GROUPS];
    const int32_t* out_tokens;   // [num_out]: tokens whose distribution is wanted
    const int32_t* logits_slot;  // [num_out]: row of `logits` to write, or -1
    int32_t num_logits;          // rows of `logits`
    int32_t* best_ids;           // out [num_out]: id of the largest logit, the lowest id among equals
    float* best_logits;          // out [num_out]: NaN if any logit of the token is
    float* logits;               // out [num_logits, vocab_size]
    float* last_hidden;          // out [num_rows, hidden] final hidden state of each row's last token, or null
    float* all_hidden;           // out [num_tokens, hidden] final hidden state of every token, or null
    uint8_t* finite;             // out [num_rows]: 1 if that state is finite
};

FP_API const char* fp_version();
// Bytes of fp_layer_spec, fp_model_spec, fp_pages, fp_step, fp_attention: a caller in another language compares its own.
FP_API void fp_struct_bytes(int64_t* bytes_5);
// 1 if this machine runs `variant`.
FP_API int32_t fp_supports(int32_t variant);

FP_API int32_t fp_pool_create(int32_t threads, int32_t spin_us, fp_pool** out, fp_error* err);
FP_API int32_t fp_pool_set_threads(fp_pool* pool, int32_t threads, fp_error* err);
FP_API void fp_pool_destroy(fp_pool* pool);
// What the pool's threads can do at most: bytes read from memory, int8 multiplications and additions, a second. Takes seconds.
FP_API int32_t fp_pool_ceilings(fp_pool* pool, double* per_second_2, fp_error* err);

FP_API int32_t fp_model_create(const fp_model_spec* spec, fp_pool* pool, fp_model** out, fp_error* err);
// `type` is GGUF's number of the tensor type; `data` is copied or repacked, not kept.
FP_API int32_t fp_model_set_tensor(fp_model* model, int32_t role, int32_t layer, int32_t type, const void* data,
                                   int64_t num_bytes, fp_error* err);
// Says which tensor is missing, if one is; required before the first step.
FP_API int32_t fp_model_seal(fp_model* model, fp_error* err);
// `num_pages`: of each sub-pool. New pages in place of those there are, whose content and addresses are lost. Between steps.
FP_API int32_t fp_model_reserve(fp_model* model, const int32_t* num_pages, fp_error* err);
FP_API int32_t fp_model_variant(const fp_model* model);
FP_API int64_t fp_model_weight_bytes(const fp_model* model);
// The pages of one sub-pool: [layers of the group][num_pages][kv_heads][keys: head_dim x 16 | values: 16 x head_dim] fp16.
FP_API int32_t fp_model_kv(fp_model* model, int32_t group, uint16_t** data, int64_t* num_elements, fp_error* err);
// One call a step: bind, then every phase.
FP_API int32_t fp_model_step(fp_model* model, const fp_step* step, fp_error* err);
// One call a phase: bind once, then phases 0 .. fp_model_num_phases - 1 in order. The arrays of `step` are lent until the last.
FP_API int32_t fp_model_bind(fp_model* model, const fp_step* step, fp_error* err);
// The output layer alone: logits [num_states, vocab_size] of final hidden states [num_states, hidden], with the bits that a step
// gives them. Between two steps.
FP_API int32_t fp_model_logits(fp_model* model, const float* states, int32_t num_states, float* logits, fp_error* err);
FP_API int32_t fp_model_num_phases(const fp_model* model);
FP_API int32_t fp_model_run_phase(fp_model* model, int32_t phase, fp_error* err);
// Seconds spent since the last call in: embedding, qkv, attention, o, gate-up, down, output layer.
FP_API int32_t fp_model_take_times(fp_model* model, double* seconds_7);
FP_API void fp_model_destroy(fp_model* model);

// Attention alone, on pages laid out as one layer of fp_model_kv, in fp16 or fp32.
struct fp_attention {
    int32_t num_rows, num_tokens, num_q_heads, num_kv_heads, head_dim, num_pages, window, pages_are_f32;
    float scale;
    const float* q;              // [num_tokens, num_q_heads, head_dim]
    const void* kv;              // [num_pages, num_kv_heads, 2, 16 * head_dim]
    const int32_t* qo_indptr;    // [num_rows + 1]
    const int32_t* seq_lens;     // [num_rows]
    fp_pages pages;              // out_cache_loc is not read
    float* out;                  // [num_tokens, num_q_heads, head_dim]
};
FP_API int32_t fp_paged_attention(fp_pool* pool, const fp_attention* args, fp_error* err);

// y = x . W^T on quantised weights: what the layers do, for tests and tools. x [m, k], y [m, n].
FP_API int32_t fp_linear(fp_pool* pool, int32_t variant, int32_t type, const void* weights, int64_t num_bytes, int32_t n,
                         int32_t k, const float* x, int32_t m, float* y, fp_error* err);

// The k largest of values[n], by value descending, then index ascending. NaN counts as smaller than every number.
FP_API int32_t fp_top_k(const float* values, int32_t n, int32_t k, int32_t* ids, float* out_values, fp_error* err);
