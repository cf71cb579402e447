#include "attention.h"

#include <algorithm>

#include "attention_tile.h"
#include "simd.h"

namespace fp {
namespace {

constexpr int kUnitsPerThread = 3;  // below this, the tiles of one row are shared out too

}  // namespace

Attention::Attention(const AttentionShape& shape) : shape_(shape) {
    const size_t states = static_cast<size_t>(kQueryRows) * shape.group() * state_floats(shape.head_dim);
    scratch_floats_ = (tile_scratch_floats(shape.group(), shape.head_dim) + 2 * states + 15) / 16 * 16;
    scratch_ = Buffer<float>(scratch_floats_ * ThreadPool::kMaxThreads);
    open_ = std::make_unique<std::atomic<int>[]>(kUnitsPerThread * ThreadPool::kMaxThreads);
}

void Attention::plan(int num_rows, const int32_t* qo_indptr, const int32_t* seq_lens, int threads) {
    tiles_.clear();
    most_tiles_ = 1;
    int most_rows = 1;
    for (int row = 0; row < num_rows; ++row) {
        const int first_position = seq_lens[row] - (qo_indptr[row + 1] - qo_indptr[row]);
        for (int token = qo_indptr[row]; token < qo_indptr[row + 1]; token += kQueryRows) {
            const int count = std::min(kQueryRows, qo_indptr[row + 1] - token);
            const int last = first_position + token - qo_indptr[row] + count - 1;
            tiles_.push_back({row, token, count, last});
            most_tiles_ = std::max(most_tiles_, last / kTile + 1);
            most_rows = std::max(most_rows, count);
        }
    }
    const int units = std::max(1, static_cast<int>(tiles_.size()) * shape_.num_kv_heads);
    const int wanted = kUnitsPerThread * threads;
    splits_ = threads == 1 || units >= wanted ? 1 : std::min(ceil_div(wanted, units), most_tiles_);
    partial_floats_ = static_cast<size_t>(most_rows) * shape_.group() * state_floats(shape_.head_dim);
    if (splits_ > 1) {
        const size_t needed = static_cast<size_t>(units) * most_tiles_ * partial_floats_;
        if (partials_.size() < needed) partials_.resize(needed);
    }
}

void Attention::prepare() {
    if (splits_ == 1) return;
    const int units = static_cast<int>(tiles_.size()) * shape_.num_kv_heads;
    for (int unit = 0; unit < units; ++unit) open_[unit].store(splits_, std::memory_order_relaxed);
}

Attention::Range Attention::tiles_of(const AttentionCall& call, const QueryTile& tile) const {
    const int first_position = tile.last_position - tile.count + 1;
    const int first = call.window ? std::max(0, first_position + 1 - call.window) : 0;
    return {first / kTile, tile.last_position / kTile + 1};
}

namespace {

// Finds the pages of a row's tiles.
struct PageFinder {
    const AttentionCall& call;
    int head;
    int last_page;   // of the sequence, as far as this query reads
    int first_page;  // of the sequence, that is listed
    const int32_t* listed;

    PageFinder(const AttentionCall& attention, int row, int kv_head, int last_position)
        : call(attention), head(kv_head), last_page(last_position / kPage) {
        const fp_pages& pages = *attention.pages;
        first_page = pages.start_positions ? pages.start_positions[row] / kPage : 0;
        listed = pages.kv_indices + pages.kv_indptr[row];
    }

    const void* page(int index) const {
        if (index < first_page || index > last_page) return nullptr;
        const size_t elements = static_cast<size_t>(2) * kPage * call.shape.head_dim;
        const size_t at = (static_cast<size_t>(listed[index - first_page]) * call.shape.num_kv_heads + head) * elements;
        return static_cast<const char*>(call.kv) + at * (call.pages_are_f32 ? sizeof(float) : sizeof(uint16_t));
    }

    TilePages tile(int index) const {
        TilePages pages;
        for (int i = 0; i < kTilePages; ++i) {
            pages.pages[i] = page(index * kTilePages + i);
            pages.next[i] = page((index + 1) * kTilePages + i);
        }
        return pages;
    }
};

}  // namespace

bool Attention::run_unit(const AttentionCall& call, int index, int head, int split, int thread) {
    const QueryTile& tile = tiles_[index];
    const int group = shape_.group(), dim = shape_.head_dim, num_states = tile.count * group;
    const size_t row_floats = static_cast<size_t>(shape_.num_q_heads) * dim, one = state_floats(dim);
    const TileQuery query = {call.q + tile.first * row_floats + static_cast<size_t>(head) * group * dim,
                             row_floats, tile.count, group, dim, tile.last_position - tile.count + 1, call.window};
    const PageFinder finder(call, tile.row, head, tile.last_position);
    const Range range = tiles_of(call, tile);
    const int count = range.end - range.begin;
    float* scratch = scratch_.data() + thread * scratch_floats_;
    float* total = scratch + tile_scratch_floats(group, dim);
    float* next = total + num_states * one;
    const auto clear = [&] { for (int s = 0; s < num_states; ++s) total[s * one + 1] = 0.0f; };
    const auto merge = [&](const float* later) {
        for (int s = 0; s < num_states; ++s) merge_state(total + s * one, later + s * one, dim);
    };
    if (splits_ == 1) {
        clear();
        for (int t = range.begin; t < range.end; ++t) {
            compute_tile(query, t, finder.tile(t), call.pages_are_f32, scratch, next);
            merge(next);
        }
        finish(call, tile, head, total);
        return true;
    }
    const size_t unit = static_cast<size_t>(index) * shape_.num_kv_heads + head;
    float* partials = partials_.data() + unit * most_tiles_ * partial_floats_;
    for (int t = count * split / splits_; t < count * (split + 1) / splits_; ++t) {
        compute_tile(query, range.begin + t, finder.tile(range.begin + t), call.pages_are_f32, scratch, partials + t * partial_floats_);
    }
    if (open_[unit].fetch_sub(1) != 1) return false;
    clear();  // the last one to finish merges everything, in order
    for (int t = 0; t < count; ++t) merge(partials + t * partial_floats_);
    finish(call, tile, head, total);
    return true;
}

void Attention::finish(const AttentionCall& call, const QueryTile& tile, int head, const float* states) const {
    const int group = shape_.group(), dim = shape_.head_dim;
    for (int row = 0; row < tile.count; ++row) {
        for (int h = 0; h < group; ++h) {
            const float* state = states + (static_cast<size_t>(row) * group + h) * state_floats(dim);
            float* out = call.out + ((static_cast<size_t>(tile.first) + row) * shape_.num_q_heads + head * group + h) * dim;
            const __m256 factor = _mm256_set1_ps(1.0f / state[1]);
            for (int i = 0; i < dim; i += 8) _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(state + kStateValues + i), factor));
        }
    }
}

}  // namespace fp
