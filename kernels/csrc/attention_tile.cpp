#include "attention_tile.h"

#include <cmath>

#include "simd.h"

namespace fp {
namespace {

constexpr int kMaxHeads = 4;  // query heads that share the loads of one pass

inline __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
inline __m256 load8(const uint16_t* from) { return load_half(from); }

// Slots of the tile that one row attends to.
struct Slots {
    int begin, end;
    bool is_full() const { return begin == 0 && end == kTile; }
    bool touches(int page) const { return begin < (page + 1) * kPage && end > page * kPage; }
};

Slots slots_of(const TileQuery& query, int row, int tile) {
    const int end = query.first_position + row + 1 - tile * kTile;  // causal: up to the row's own position
    const int begin = query.window ? end - query.window : 0;
    return {begin > 0 ? begin : 0, end < kTile ? end : kTile};
}

// Scores of `H` heads against one page of keys [dim, 16]: scores[h * kTile + slot]. Fetches the page's values meanwhile.
template <int H, class T>
void score_page(const float* q, int dim, const T* keys, float* scores) {
    const char* values = reinterpret_cast<const char*>(keys + static_cast<size_t>(dim) * kPage);
    __m256 acc[2 * H];
    for (__m256& value : acc) value = _mm256_setzero_ps();
    for (int d = 0; d < dim; ++d, keys += kPage) {
        if (sizeof(T) == 2 && d % 2 == 0) _mm_prefetch(values + d * 32, _MM_HINT_T0);
        const __m256 k0 = load8(keys), k1 = load8(keys + 8);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            const __m256 value = _mm256_broadcast_ss(q + static_cast<size_t>(h) * dim + d);
            acc[2 * h] = _mm256_fmadd_ps(value, k0, acc[2 * h]);
            acc[2 * h + 1] = _mm256_fmadd_ps(value, k1, acc[2 * h + 1]);
            FP_PIN(acc[2 * h]);
            FP_PIN(acc[2 * h + 1]);
        }
    }
    for (int h = 0; h < H; ++h) {
        _mm256_storeu_ps(scores + h * kTile, acc[2 * h]);
        _mm256_storeu_ps(scores + h * kTile + 8, acc[2 * h + 1]);
    }
}

// Turns one head's scores into weights in place, zero outside `slots`; returns the largest score and the sum of the weights.
void softmax_tile(float* scores, Slots slots, float* largest, float* sum) {
    const __m256 nothing = _mm256_set1_ps(-INFINITY);
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 values[kTile / 8], masks[kTile / 8];
    __m256 most = nothing;
    for (int i = 0; i < kTile / 8; ++i) {
        const __m256i slot = _mm256_add_epi32(lanes, _mm256_set1_epi32(8 * i));
        const __m256i from = _mm256_cmpgt_epi32(slot, _mm256_set1_epi32(slots.begin - 1));
        masks[i] = _mm256_castsi256_ps(_mm256_and_si256(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(slots.end), slot)));
        values[i] = _mm256_blendv_ps(nothing, _mm256_loadu_ps(scores + 8 * i), masks[i]);
        most = _mm256_max_ps(most, values[i]);
    }
    *largest = max_of(most);
    const __m256 top = _mm256_set1_ps(*largest);
    __m256 total = _mm256_setzero_ps();
    for (int i = 0; i < kTile / 8; ++i) {
        const __m256 weight = _mm256_and_ps(exp_of(_mm256_sub_ps(values[i], top)), masks[i]);
        total = _mm256_add_ps(total, weight);
        _mm256_storeu_ps(scores + 8 * i, weight);
    }
    *sum = sum_of(total);
}

// values[h] += weights[h][slot] * v[slot] for `H` heads and 8 * V of the `dim` values, slot by slot.
template <int H, int V, class T>
void weigh(const float* weights, Slots slots, const T* const* pages, const void* const* next, int dim, int at, float* states) {
    __m256 acc[H * V];
    for (__m256& value : acc) value = _mm256_setzero_ps();
    for (int page = slots.begin / kPage; page * kPage < slots.end; ++page) {
        const int begin = slots.begin > page * kPage ? slots.begin : page * kPage;
        const int end = slots.end < (page + 1) * kPage ? slots.end : (page + 1) * kPage;
        const T* v = pages[page] + static_cast<size_t>(begin % kPage) * dim + at;
        const char* ahead = static_cast<const char*>(next[page]);
        for (int slot = begin; slot < end; ++slot, v += dim) {
            if (sizeof(T) == 2 && ahead) _mm_prefetch(ahead + (slot % kPage * dim + at) * sizeof(T), _MM_HINT_T0);
            __m256 weight[H];
            for (int h = 0; h < H; ++h) weight[h] = _mm256_broadcast_ss(weights + h * kTile + slot);
#pragma GCC unroll 4
            for (int i = 0; i < V; ++i) {
                const __m256 value = load8(v + 8 * i);
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) {
                    acc[h * V + i] = _mm256_fmadd_ps(weight[h], value, acc[h * V + i]);
                    FP_PIN(acc[h * V + i]);
                }
            }
        }
    }
    for (int h = 0; h < H; ++h) {
        float* to = states + h * state_floats(dim) + kStateValues + at;
        for (int i = 0; i < V; ++i) _mm256_storeu_ps(to + 8 * i, acc[h * V + i]);
    }
}

template <class T>
struct TileView {
    const T* keys[kTilePages];
    const T* values[kTilePages];
    const void* next[kTilePages];
};

// One row, `H` heads from `q` on.
template <int H, class T>
void row_heads(const float* q, int dim, const TileView<T>& view, Slots slots, float* scores, float* states) {
    for (int page = 0; page < kTilePages; ++page) {
        if (slots.touches(page)) score_page<H>(q, dim, view.keys[page], scores + page * kPage);
    }
    for (int h = 0; h < H; ++h) {
        float* state = states + h * state_floats(dim);
        softmax_tile(scores + h * kTile, slots, state, state + 1);
    }
    constexpr int kVectors = H == kMaxHeads ? 2 : 4;  // 16 registers hold 12 sums beside weights and values
    for (int at = 0; at < dim; at += 8 * kVectors) {
        weigh<H, kVectors>(scores, slots, view.values, view.next, dim, at, states);
    }
}

template <class T>
void tile_rows(const TileQuery& query, int tile, const TileView<T>& view, float* scores, float* states) {
    for (int row = 0; row < query.rows; ++row) {
        const Slots slots = slots_of(query, row, tile);
        for (int head = 0; head < query.group; head += kMaxHeads) {
            float* state = states + (static_cast<size_t>(row) * query.group + head) * state_floats(query.dim);
            const int heads = query.group - head < kMaxHeads ? query.group - head : kMaxHeads;
            if (slots.begin >= slots.end) {
                for (int h = 0; h < heads; ++h) state[h * state_floats(query.dim) + 1] = 0.0f;
                continue;
            }
            const float* q = query.q + row * query.stride + static_cast<size_t>(head) * query.dim;
            switch (heads) {
                case 1: row_heads<1>(q, query.dim, view, slots, scores, state); break;
                case 2: row_heads<2>(q, query.dim, view, slots, scores, state); break;
                case 3: row_heads<3>(q, query.dim, view, slots, scores, state); break;
                default: row_heads<4>(q, query.dim, view, slots, scores, state); break;
            }
        }
    }
}

template <class T>
TileView<T> view_of(const TilePages& pages, int dim) {
    TileView<T> view;
    for (int i = 0; i < kTilePages; ++i) {
        view.keys[i] = static_cast<const T*>(pages.pages[i]);
        view.values[i] = view.keys[i] ? view.keys[i] + static_cast<size_t>(dim) * kPage : nullptr;
        view.next[i] = pages.next[i];
    }
    return view;
}

// Several rows read the tile: convert it once.
TileView<float> converted(const TilePages& pages, int dim, float* to) {
    const size_t count = static_cast<size_t>(2) * dim * kPage;
    TilePages floats = {};
    for (int i = 0; i < kTilePages; ++i, to += count) {
        if (!pages.pages[i]) continue;
        const auto* from = static_cast<const uint16_t*>(pages.pages[i]);
        const char* next = static_cast<const char*>(pages.pages[i + 1 < kTilePages ? i + 1 : i]);
        for (size_t k = 0; k < count; k += 32) {
            if (next) _mm_prefetch(next + k * sizeof(uint16_t), _MM_HINT_T0);
            for (size_t j = k; j < k + 32; j += 8) _mm256_storeu_ps(to + j, load_half(from + j));
        }
        floats.pages[i] = to;
    }
    return view_of<float>(floats, dim);
}

}  // namespace

size_t tile_scratch_floats(int group, int dim) {
    const int heads = group < kMaxHeads ? group : kMaxHeads;
    return static_cast<size_t>(heads) * kTile + static_cast<size_t>(2) * dim * kTile;
}

void compute_tile(const TileQuery& query, int tile, const TilePages& pages, bool pages_are_f32, float* scratch, float* states) {
    float* floats = scratch + (query.group < kMaxHeads ? query.group : kMaxHeads) * kTile;
    if (pages_are_f32) {
        tile_rows(query, tile, view_of<float>(pages, query.dim), scratch, states);
    } else if (query.rows == 1) {
        tile_rows(query, tile, view_of<uint16_t>(pages, query.dim), scratch, states);
    } else {
        tile_rows(query, tile, converted(pages, query.dim, floats), scratch, states);
    }
}

void merge_state(float* state, const float* later, int dim) {
    if (later[1] == 0.0f) return;
    if (state[1] == 0.0f) {
        for (int i = 0; i < kStateValues + dim; i += 8) _mm256_storeu_ps(state + i, _mm256_loadu_ps(later + i));
        return;
    }
    const float most = later[0] > state[0] ? later[0] : state[0];
    const __m256 factors = exp_of(_mm256_setr_ps(state[0] - most, later[0] - most, 0, 0, 0, 0, 0, 0));
    const __m256 mine = _mm256_broadcastss_ps(_mm256_castps256_ps128(factors));
    const __m256 others = _mm256_set1_ps(_mm256_cvtss_f32(_mm256_permute_ps(factors, 1)));
    state[1] = state[1] * _mm256_cvtss_f32(mine) + later[1] * _mm256_cvtss_f32(others);
    state[0] = most;
    for (int i = kStateValues; i < kStateValues + dim; i += 8) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(later + i), others);
        _mm256_storeu_ps(state + i, _mm256_fmadd_ps(_mm256_loadu_ps(state + i), mine, scaled));
    }
}

}  // namespace fp
