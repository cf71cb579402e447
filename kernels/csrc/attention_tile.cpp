#include "attention_tile.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd.h"

namespace fp {
namespace {

constexpr int kMaxQueries = 6;  // that share the loads of one pass: 12 sums, and what they need, fill the registers
constexpr int kMaxBlocks = 16;

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

// Scores of `H` queries against one page of keys [dim, 16]: scores[h * kTile + slot]. Fetches the page's values meanwhile.
template <int H, class T>
void score_page(const float* const* queries, int dim, const T* keys, float* scores) {
    const char* values = reinterpret_cast<const char*>(keys + static_cast<size_t>(dim) * kPage);
    const float* q[H];
    __m256 acc[2 * H];
    repeat<H>([&](auto h) FP_INLINE {
        q[h] = queries[h];
        acc[2 * h] = acc[2 * h + 1] = _mm256_setzero_ps();
    });
    for (int d = 0; d < dim; ++d, keys += kPage) {
        if (sizeof(T) == 2 && d % 2 == 0) _mm_prefetch(values + d * 32, _MM_HINT_T0);
        const __m256 k0 = load8(keys), k1 = load8(keys + 8);
        repeat<H>([&](auto h) FP_INLINE {
            const __m256 value = _mm256_broadcast_ss(q[h] + d);
            acc[2 * h] = pinned(_mm256_fmadd_ps(value, k0, acc[2 * h]));
            acc[2 * h + 1] = pinned(_mm256_fmadd_ps(value, k1, acc[2 * h + 1]));
        });
    }
    repeat<H>([&](auto h) FP_INLINE {
        _mm256_storeu_ps(scores + h * kTile, acc[2 * h]);
        _mm256_storeu_ps(scores + h * kTile + 8, acc[2 * h + 1]);
    });
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

template <class T>
struct TileView {
    const T* keys[kTilePages];
    const T* values[kTilePages];
    const void* next[kTilePages];
};

// states[h] += weights[h][slot] * v[slot] for `H` queries and 8 * V of the `dim` values from `at` on, slot by slot.
template <int H, int V, class T>
void weigh(const float* weights, Slots slots, const TileView<T>& view, int dim, int at, float* states) {
    const size_t stride = state_floats(dim);
    __m256 acc[H * V];
    states += kStateValues + at;
    repeat<H * V>([&](auto i) FP_INLINE { acc[i] = _mm256_loadu_ps(states + i / V * stride + 8 * (i % V)); });
    for (int page = slots.begin / kPage; page * kPage < slots.end; ++page) {
        const int begin = slots.begin > page * kPage ? slots.begin : page * kPage;
        const int end = slots.end < (page + 1) * kPage ? slots.end : (page + 1) * kPage;
        const T* v = view.values[page] + static_cast<size_t>(begin % kPage) * dim + at;
        const char* ahead = static_cast<const char*>(view.next[page]);
        for (int slot = begin; slot < end; ++slot, v += dim) {
            if (sizeof(T) == 2 && ahead) _mm_prefetch(ahead + (slot % kPage * dim + at) * sizeof(T), _MM_HINT_T0);
            const auto add = [&](auto h, auto i, __m256 weight, __m256 value) FP_INLINE {
                acc[h * V + i] = pinned(_mm256_fmadd_ps(weight, value, acc[h * V + i]));
            };
            if constexpr (H < V) {  // 12 sums leave four registers: for the fewer of weights and values, and one of the others
                __m256 weight[H];
                repeat<H>([&](auto h) FP_INLINE { weight[h] = _mm256_broadcast_ss(weights + h * kTile + slot); });
                repeat<V>([&](auto i) FP_INLINE {
                    const __m256 value = load8(v + 8 * i);
                    repeat<H>([&](auto h) FP_INLINE { add(h, i, weight[h], value); });
                });
            } else {
                __m256 value[V];
                repeat<V>([&](auto i) FP_INLINE { value[i] = load8(v + 8 * i); });
                repeat<H>([&](auto h) FP_INLINE {
                    const __m256 weight = _mm256_broadcast_ss(weights + h * kTile + slot);
                    repeat<V>([&](auto i) FP_INLINE { add(h, i, weight, value[i]); });
                });
            }
        }
    }
    repeat<H * V>([&](auto i) FP_INLINE { _mm256_storeu_ps(states + i / V * stride + 8 * (i % V), acc[i]); });
}

// Calls work(integral constant of count): the one that is compiled for so many queries.
template <class Work>
void with_count(int count, const Work& work) {
    switch (count) {
        case 1: return work(std::integral_constant<int, 1>());
        case 2: return work(std::integral_constant<int, 2>());
        case 3: return work(std::integral_constant<int, 3>());
        case 4: return work(std::integral_constant<int, 4>());
        case 5: return work(std::integral_constant<int, 5>());
        default: return work(std::integral_constant<int, 6>());
    }
}

// Neighbouring queries (rows in order, the heads of each together) that share the loads of one pass over the tile.
struct Block {
    const float* queries[kMaxQueries];
    Slots slots[kMaxQueries];
    int count;
    int first;     // among the queries of the tile
    Slots common;  // that all of them attend to; may be empty
    bool touches(int page) const {
        return std::any_of(slots, slots + count, [&](const Slots& own) { return own.touches(page); });
    }
};

Block block_of(const TileQuery& query, int tile, int first) {
    Block block;
    block.first = first;
    block.count = std::min(kMaxQueries, query.rows * query.group - first);
    block.common = {0, kTile};
    for (int i = 0; i < block.count; ++i) {
        const int row = (first + i) / query.group, head = (first + i) % query.group;
        block.queries[i] = query.q + row * query.stride + static_cast<size_t>(head) * query.dim;
        const Slots own = block.slots[i] = slots_of(query, row, tile);
        block.common = {std::max(block.common.begin, own.begin), std::min(block.common.end, own.end)};
    }
    return block;
}

template <class T>
void score_block(const Block& block, const TileView<T>& view, int page, int dim, float* scores) {
    if (!block.touches(page)) return;
    with_count(block.count, [&](auto count) {
        score_page<count.value>(block.queries, dim, view.keys[page], scores + block.first * kTile + page * kPage);
    });
}

// Values [at, at + 32) of the block's queries. Slots that only some attend to come before and after the common ones.
template <class T>
void weigh_block(const Block& block, const float* scores, const TileView<T>& view, int dim, int at, float* states) {
    const size_t stride = state_floats(dim);
    const float* weights = scores + block.first * kTile;
    float* own_states = states + block.first * stride;
    const auto alone = [&](int i, int begin, int end) {
        if (begin < end) weigh<1, 4>(weights + i * kTile, Slots{begin, end}, view, dim, at, own_states + i * stride);
    };
    const bool have_common = block.common.begin < block.common.end;
    for (int i = 0; i < block.count; ++i) {
        const Slots own = block.slots[i];
        alone(i, own.begin, have_common ? block.common.begin : own.end);
    }
    if (!have_common) return;
    with_count(block.count, [&](auto count) {
        constexpr int kVectors = count.value > 3 ? 2 : 4;  // 16 registers hold 12 sums beside weights and values
        for (int part = 0; part < 4; part += kVectors) {
            weigh<count.value, kVectors>(weights, block.common, view, dim, at + 8 * part, own_states);
        }
    });
    for (int i = 0; i < block.count; ++i) alone(i, block.common.end, block.slots[i].end);
}

// Queries [first, first + kMaxBlocks * kMaxQueries). One part of the tile at a time, all queries on it, so that it stays in the
// nearest cache.
template <class T>
void tile_queries(const TileQuery& query, int tile, int first, const TileView<T>& view, float* scores, float* states) {
    Block blocks[kMaxBlocks];
    int num_blocks = 0;
    const int dim = query.dim, end = std::min(query.rows * query.group, first + kMaxBlocks * kMaxQueries);
    for (int at = first; at < end; at += kMaxQueries) blocks[num_blocks++] = block_of(query, tile, at);
    for (int page = 0; page < kTilePages; ++page) {
        for (int b = 0; b < num_blocks; ++b) score_block(blocks[b], view, page, dim, scores);
    }
    for (int i = first; i < end; ++i) {
        float* state = states + i * state_floats(dim);
        std::fill(state, state + state_floats(dim), 0.0f);
        const Slots own = blocks[(i - first) / kMaxQueries].slots[(i - first) % kMaxQueries];
        if (own.begin < own.end) softmax_tile(scores + i * kTile, own, state, state + 1);
    }
    for (int at = 0; at < dim; at += kBlock) {
        for (int b = 0; b < num_blocks; ++b) weigh_block(blocks[b], scores, view, dim, at, states);
    }
}

template <class T>
void tile_rows(const TileQuery& query, int tile, const TileView<T>& view, float* scores, float* states) {
    for (int first = 0; first < query.rows * query.group; first += kMaxBlocks * kMaxQueries) {
        tile_queries(query, tile, first, view, scores, states);
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
    return static_cast<size_t>(kQueryRows) * group * kTile + static_cast<size_t>(2) * dim * kTile;
}

void compute_tile(const TileQuery& query, int tile, const TilePages& pages, bool pages_are_f32, float* scratch, float* states) {
    float* floats = scratch + static_cast<size_t>(kQueryRows) * query.group * kTile;
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
