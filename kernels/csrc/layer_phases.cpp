// The phases of a layer: what is done to every token of the bound step.
#include <algorithm>
#include <cstring>

#include "model_share.h"
#include "row_math.h"
#include "simd.h"

namespace fp {

void Model::run_embedding() {
    const int hidden = spec_.hidden_size;
    const size_t stride = row_bytes(embedding_type_, hidden);
    for_rows(step_.num_tokens, [&](int token) {
        float* x = x_.data() + static_cast<size_t>(token) * hidden;
        dequantise_row(embedding_type_, embedding_.data() + step_.input_ids[token] * stride, hidden, x);
        if (spec_.embedding_scale != 1.0f) scale_by(x, spec_.embedding_scale, hidden);
    });
}

void Model::normalise(const std::vector<float>& weight, QuantisedRows& to) {
    const int hidden = spec_.hidden_size;
    for_rows(step_.num_tokens, [&](int token) {
        float* normed = projected_.data() + static_cast<size_t>(token) * hidden;
        rms_norm(x_.data() + static_cast<size_t>(token) * hidden, weight.data(), hidden, spec_.rms_epsilon, normed);
        to.put(token, 0, normed, hidden);
    });
}

// Phase 1: norm, q k v with bias, head norms, rotation, KV write. A unit is one head of q, k or v.
void Model::run_qkv(Layer& layer) {
    normalise(layer.attn_norm, normed_);
    const size_t products = static_cast<size_t>(spec_.head_dim) * spec_.hidden_size * step_.num_tokens;
    share(spec_.num_q_heads + 2 * spec_.num_kv_heads, products, [&](int begin, int end, int thread) {
        for (int head = begin; head < end; ++head) make_head(layer, head, thread);
    });
}

// `head` counts those of q, then k, then v.
void Model::make_head(Layer& layer, int head, int thread) {
    const int dim = spec_.head_dim, q_heads = spec_.num_q_heads, kv_heads = spec_.num_kv_heads;
    const bool is_q = head < q_heads, is_v = head >= q_heads + kv_heads;
    const int index = is_q ? head : is_v ? head - q_heads - kv_heads : head - q_heads;
    const PackedMatrix& matrix = is_q ? layer.q : is_v ? layer.v : layer.k;
    const std::vector<float>& bias = is_q ? layer.q_bias : is_v ? layer.v_bias : layer.k_bias;
    const std::vector<float>& norm = is_q ? layer.q_norm : layer.k_norm;
    const size_t stride = is_q ? static_cast<size_t>(q_heads) * dim : dim;
    float* out = is_q ? q_.data() + static_cast<size_t>(index) * dim : threads_[thread].rows;
    multiply(matrix, index * dim / kPanel, dim / kPanel, normed_, step_.num_tokens, out, stride, thread);
    for (int token = 0; token < step_.num_tokens; ++token, out += stride) {
        if (!bias.empty()) add_to(out, bias.data() + static_cast<size_t>(index) * dim, dim);
        if (is_v) {
            write_value(layer, index, token, out);
            continue;
        }
        if (!norm.empty()) rms_norm(out, norm.data(), dim, spec_.rms_epsilon, out);
        rotate(layer, out, step_.positions[token]);
        if (is_q) {
            scale_by(out, spec_.attention_scale, dim);
        } else {
            write_key(layer, index, token, out);
        }
    }
}

void Model::rotate(const Layer& layer, float* head, int64_t position) const {
    const int dim = spec_.head_dim;
    const size_t at = static_cast<size_t>(position) * (dim / 2);
    const float *cosines = cosines_[layer.spec.rope].data() + at, *sines = sines_[layer.spec.rope].data() + at;
    if (spec_.rope_interleaved) {
        rotate_interleaved(head, cosines, sines, dim);
    } else {
        rotate_halves(head, cosines, sines, dim);
    }
}

uint16_t* Model::page(const Layer& layer, int64_t page, int kv_head) {
    const size_t pages = spec_.num_pages[layer.spec.group];
    const size_t index = (layer.index_in_group * pages + page) * spec_.num_kv_heads + kv_head;
    return kv_[layer.spec.group].data() + index * (2 * kPage * static_cast<size_t>(spec_.head_dim));
}

void Model::write_key(const Layer& layer, int kv_head, int token, const float* key) {
    const int64_t slot = pages_of(layer).out_cache_loc[token];
    if (slot < kPage) return;  // the sink
    uint16_t* to = page(layer, slot / kPage, kv_head) + slot % kPage;
    for (int d = 0; d < spec_.head_dim; d += 8) {
        uint16_t halves[8];
        store_half(halves, _mm256_loadu_ps(key + d));
        for (int i = 0; i < 8; ++i) to[(d + i) * kPage] = halves[i];
    }
}

void Model::write_value(const Layer& layer, int kv_head, int token, const float* value) {
    const int64_t slot = pages_of(layer).out_cache_loc[token];
    if (slot < kPage) return;
    const int dim = spec_.head_dim;
    uint16_t* to = page(layer, slot / kPage, kv_head) + (kPage + slot % kPage) * static_cast<size_t>(dim);
    for (int d = 0; d < dim; d += 8) store_half(to + d, _mm256_loadu_ps(value + d));
}

// Phase 2: attention, quantised for phase 3 as each part is complete.
void Model::run_attention(Layer& layer) {
    const int dim = spec_.head_dim, columns = spec_.num_q_heads / spec_.num_kv_heads * dim;
    const size_t stride = static_cast<size_t>(spec_.num_q_heads) * dim;
    const AttentionCall call = {{spec_.num_q_heads, spec_.num_kv_heads, dim}, q_.data(), page(layer, 0, 0), false, layer.spec.window,
                                step_.qo_indptr, step_.seq_lens, &pages_of(layer), attended_.data()};
    attention_.run(pool_, call, [&](int first, int count, int kv_head) {
        for (int token = first; token < first + count; ++token) {
            attended_rows_.put(token, kv_head * columns, attended_.data() + token * stride + kv_head * columns, columns);
        }
    });
}

// Phases 3 and 5: x += rows times matrix, normalised before the sum where the family does so.
void Model::run_projection(const PackedMatrix& matrix, const QuantisedRows& rows, const std::vector<float>& post_norm) {
    const int hidden = spec_.hidden_size, tokens = step_.num_tokens;
    const bool is_direct = post_norm.empty();
    share(matrix.num_panels(), static_cast<size_t>(kPanel) * matrix.k() * tokens, [&](int begin, int end, int thread) {
        for (int panel = begin; panel < end; ++panel) {
            float* products = is_direct ? threads_[thread].rows : projected_.data() + panel * kPanel;
            const size_t stride = is_direct ? kPanel : hidden;
            multiply(matrix, panel, 1, rows, tokens, products, stride, thread);
            for (int token = 0; is_direct && token < tokens; ++token) {
                add_to(x_.data() + static_cast<size_t>(token) * hidden + panel * kPanel, products + token * stride, kPanel);
            }
        }
    });
    if (is_direct) return;
    for_rows(tokens, [&](int token) {
        float* row = projected_.data() + static_cast<size_t>(token) * hidden;
        rms_norm(row, post_norm.data(), hidden, spec_.rms_epsilon, row);
        add_to(x_.data() + static_cast<size_t>(token) * hidden, row, hidden);
    });
}

// Phase 4: norm, gate and up, activation, quantised for phase 5. A unit is one block of 32 columns.
void Model::run_gate_up(Layer& layer) {
    normalise(layer.ffn_norm, normed_);
    const int tokens = step_.num_tokens;
    const auto gated = spec_.activation == FP_SILU ? gated_silu : gated_gelu_tanh;
    constexpr int kPanels = kBlock / kPanel;
    const size_t products = static_cast<size_t>(2 * kBlock) * spec_.hidden_size * tokens;
    share(spec_.ffn_size / kBlock, products, [&](int begin, int end, int thread) {
        float *gate = threads_[thread].rows, *up = threads_[thread].rows2;
        for (int block = begin; block < end; ++block) {
            multiply(layer.gate, block * kPanels, kPanels, normed_, tokens, gate, kBlock, thread);
            multiply(layer.up, block * kPanels, kPanels, normed_, tokens, up, kBlock, thread);
            gated(gate, up, tokens * kBlock);
            for (int token = 0; token < tokens; ++token) ffn_rows_.put(token, block * kBlock, gate + token * kBlock, kBlock);
        }
    });
}

}  // namespace fp
