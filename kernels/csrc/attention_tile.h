// One tile of attention: 64 positions of one KV head against the query rows of one request.
#pragma once
#include "attention.h"

namespace fp {

// What one query row and head has gathered: [m, l, values[dim]]; l = 0 means nothing yet. m is the largest score, l the sum of
// e^(score - m), values the sum of e^(score - m) * v.
inline size_t state_floats(int dim) { return static_cast<size_t>(dim) + 8; }
constexpr int kStateValues = 8;  // where the values start: keeps them on vector borders

// The pages of one tile, null where nothing is listed, and those of the tile after it, for prefetching.
struct TilePages {
    const void* pages[kTilePages];
    const void* next[kTilePages];
};

struct TileQuery {
    const float* q;   // first row's heads of this KV head: [group, dim]
    size_t stride;    // floats from one row to the next
    int rows;
    int group;
    int dim;
    int first_position;  // of the first row
    int window;          // 0: none
};

// Floats of scratch that compute_tile needs.
size_t tile_scratch_floats(int group, int dim);

// Writes each row and head's state of tile `tile` to `states` [rows, group, state_floats(dim)].
void compute_tile(const TileQuery& query, int tile, const TilePages& pages, bool pages_are_f32, float* scratch, float* states);

// state += later, for one row and head. Order matters to the last bit: `later` is the tile after all of `state`.
void merge_state(float* state, const float* later, int dim);

}  // namespace fp
