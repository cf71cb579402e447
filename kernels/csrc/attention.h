// Paged attention: pages are read in place, in a fixed order of tiles that does not depend on who computes what.
//
// A tile is 64 positions (4 pages), aligned in the sequence. For each query row, head and tile: scores, largest score m, weights
// e^(score - m), their sum, and the weighted values. Tiles are merged from the first to the last. So a row's output has the same
// bits whether it is decoded, prefilled in any chunking, or its tiles are shared out over threads. Slots at or past the row's
// length, and before its window, are never multiplied: whatever they hold (NaN too) changes nothing.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "common.h"
#include "thread_pool.h"

namespace fp {

constexpr int kTilePages = 4;
constexpr int kTile = kTilePages * kPage;
constexpr int kQueryRows = 16;  // query rows of one request that share a converted tile

struct AttentionShape {
    int num_q_heads, num_kv_heads, head_dim;
    int group() const { return num_q_heads / num_kv_heads; }
};

// One step's attention of one layer. `kv` [num_pages, num_kv_heads, 2, 16 * head_dim]: keys head_dim x 16, values 16 x head_dim.
struct AttentionCall {
    AttentionShape shape;
    const float* q;  // [tokens, num_q_heads, head_dim], scaled
    const void* kv;
    bool pages_are_f32;
    int window;
    const int32_t* qo_indptr;
    const int32_t* seq_lens;
    const fp_pages* pages;
    float* out;  // [tokens, num_q_heads, head_dim]
};

// Work shared out by query tile, KV head and, when there is little, range of tiles. Kept between steps for its memory.
class Attention {
  public:
    explicit Attention(const AttentionShape& shape);

    // Plans one step's rows; the arrays are read again by run().
    void plan(int num_rows, const int32_t* qo_indptr, const int32_t* seq_lens, int threads);

    // Calls finished(first token, tokens, kv head) once each part of `out` is complete.
    template <class Finished>
    void run(ThreadPool& pool, const AttentionCall& call, const Finished& finished) {
        const int heads = shape_.num_kv_heads;
        const int units = static_cast<int>(tiles_.size()) * heads * splits_;
        prepare();
        const int per_chunk = ceil_div(units, ThreadPool::kMaxChunks);
        pool.run(ceil_div(units, per_chunk), [&](int chunk, int thread) {
            for (int unit = chunk * per_chunk; unit < (chunk + 1) * per_chunk && unit < units; ++unit) {
                const int tile = unit / splits_ / heads, head = unit / splits_ % heads, split = unit % splits_;
                if (run_unit(call, tile, head, split, thread)) finished(tiles_[tile].first, tiles_[tile].count, head);
            }
        });
    }

  private:
    struct QueryTile {
        int row, first, count;  // request row, first token, tokens
        int last_position;
    };
    struct Range {
        int begin, end;  // tiles
    };

    void prepare();
    Range tiles_of(const AttentionCall& call, const QueryTile& tile) const;
    bool run_unit(const AttentionCall& call, int tile, int head, int split, int thread);
    void finish(const AttentionCall& call, const QueryTile& tile, int head, const float* state) const;

    AttentionShape shape_;
    std::vector<QueryTile> tiles_;
    int splits_ = 1;
    int most_tiles_ = 1;
    size_t scratch_floats_ = 0;
    size_t partial_floats_ = 0;
    Buffer<float> scratch_;                     // [threads][scratch_floats_]
    std::vector<float> partials_;               // [query tiles][kv heads][KV tiles][partial_floats_], when tiles are shared out
    std::unique_ptr<std::atomic<int>[]> open_;  // [query tiles][kv heads]: splits that are not finished
};

}  // namespace fp
