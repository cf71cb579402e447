// A Llama-like decoder on packed weights: the weights, the KV pages, the buffers of one step, and the phases that walk them.
//
// Phases: 0 embeds; five for each layer; one for the output layer. Eager mode calls them one by one, a whole step calls them all:
// the same code, so the same bits. Every buffer keeps its address for the model's life.
#pragma once
#include <memory>
#include <vector>

#include "attention.h"
#include "common.h"
#include "packed_matrix.h"
#include "products.h"
#include "thread_pool.h"

namespace fp {

constexpr int kPhasesPerLayer = 5;
constexpr int kNumTimes = kPhasesPerLayer + 2;

struct Layer {
    fp_layer_spec spec;
    int index_in_group;
    PackedMatrix q, k, v, o, gate, up, down;
    std::vector<float> attn_norm, ffn_norm, q_bias, k_bias, v_bias, q_norm, k_norm, post_attn_norm, post_ffn_norm;
};

// Activation rows as the products want them, quantised where they are made.
class QuantisedRows {
  public:
    QuantisedRows() = default;
    QuantisedRows(int rows, int k, bool floats);
    // Which forms are written; set once the weights are known.
    void want(const PackedMatrix& matrix) { (takes_int8(matrix.packing()) ? int8_ : int16_) = true; }
    // Stores x[0, count) as columns [column, column + count) of `row`; both multiples of 32.
    void put(int row, int column, const float* x, int count);
    Activations view() const;

  private:
    int k_ = 0;
    bool int8_ = false, int16_ = false, floats_ = false;
    Buffer<int8_t> q8_;
    Buffer<int16_t> q16_;
    Buffer<float> d8_, s8_, d16_, f32_;
};

class Model {
  public:
    Model(const fp_model_spec& spec, ThreadPool& pool);

    void set_tensor(int role, int layer, int type, const uint8_t* data, int64_t num_bytes);
    void seal();
    // New pages in place of those there are, whose content is lost. Between steps.
    void reserve(const int32_t* num_pages);
    void bind(const fp_step& step);
    int num_phases() const { return 2 + kPhasesPerLayer * spec_.num_layers; }
    void run_phase(int phase);
    void step(const fp_step& step);
    // The output layer on states of an earlier step.
    void logits_of(const float* states, int num_states, float* logits);
    Buffer<uint16_t>& kv(int group);
    void take_times(double* seconds);
    int variant() const { return variant_; }
    int64_t weight_bytes() const;

  private:
    struct BestLogits {
        float values[kPanel];
        int32_t panels[kPanel];
        int32_t broken[8];  // lanes that met NaN
    };
    struct ThreadScratch {
        float* rows;   // [max_tokens, widest head or 32]
        float* rows2;  // [max_tokens, 32]
        ProductScratch product;
    };

    void check_spec() const;
    // Rows [0, rows) of `x` times panels [panel, panel + panels) of `matrix`, to `out`, `stride` floats from row to row.
    void multiply(const PackedMatrix& matrix, int panel, int panels, const QuantisedRows& x, int rows, float* out, size_t stride,
                  int thread);
    // Shares out `units` of `products` multiply-adds each: body(begin, end, thread).
    template <class Body>
    void share(int units, size_t products, const Body& body);
    template <class Body>
    void for_rows(int rows, const Body& body);

    void run_embedding();
    void run_qkv(Layer& layer);
    void run_attention(Layer& layer);
    void run_projection(const PackedMatrix& matrix, const QuantisedRows& x, const std::vector<float>& post_norm);
    void run_gate_up(Layer& layer);
    void run_output();
    void normalise(const std::vector<float>& weight, QuantisedRows& to);
    void make_head(Layer& layer, int head, int thread);
    void rotate(const Layer& layer, float* head, int64_t position) const;
    // One kv head's keys, then values, of one layer's page.
    uint16_t* page(const Layer& layer, int64_t page, int kv_head);
    void write_key(const Layer& layer, int kv_head, int token, const float* key);
    void write_value(const Layer& layer, int kv_head, int token, const float* value);
    void finish_rows();
    void output_panel(int panel, int thread);
    void choose_best();
    BestLogits& best_of(int thread, int out) { return best_[static_cast<size_t>(thread) * spec_.max_tokens + out]; }
    const fp_pages& pages_of(const Layer& layer) const { return step_.pages[layer.spec.group]; }

    fp_model_spec spec_;
    std::vector<fp_layer_spec> layer_specs_;
    ThreadPool& pool_;
    int variant_ = FP_AVX2;
    const ProductTable* products_ = nullptr;
    bool sealed_ = false;
    int layers_in_group_[FP_MAX_GROUPS] = {};
    std::vector<Layer> layers_;
    int embedding_type_ = 0;
    Buffer<uint8_t> embedding_;
    PackedMatrix output_;
    std::vector<float> output_norm_, rope_factors_;
    Buffer<float> cosines_[FP_MAX_ROPES], sines_[FP_MAX_ROPES];
    Buffer<uint16_t> kv_[FP_MAX_GROUPS];

    fp_step step_{};
    Attention attention_;
    Buffer<float> x_, q_, attended_, projected_, final_;
    QuantisedRows normed_, attended_rows_, ffn_rows_, out_rows_;
    Buffer<float> scratch_;
    std::vector<ThreadScratch> threads_;
    Buffer<BestLogits> best_;  // [threads, max_tokens]
    double times_[kNumTimes] = {};
};

// Fails, naming the argument, unless every index of `step` is in range of `spec`.
void check_step(const fp_step& step, const fp_model_spec& spec);
// The same for the row tables that attention alone uses.
void check_rows(int num_rows, int num_tokens, const int32_t* qo_indptr, const int32_t* seq_lens);
struct PageLimits {
    int num_pages, window;
};
void check_pages(const fp_pages& pages, int num_rows, const int32_t* qo_indptr, const int32_t* seq_lens, PageLimits limits);

}  // namespace fp
