// A weight matrix repacked for the products: 16 output columns side by side, block by block of 32 inputs.
//
// One panel is 16 columns, one panel block is 16 columns x 32 inputs:
//   nibbles: 4 x 64 bytes; byte [g][4 c + i] holds inputs 8 g + i (low) and 8 g + 4 + i (high) of column c,
//            then the scales and the minima of the 16 columns (fp16 or fp32): w = scale * q + min
//   bytes:   16 x 32 bytes; byte [g][2 c + i] holds input 2 g + i of column c, signed,
//            then the scales of the 16 columns: one fp16 each, or one fp32 for each half of the block: w = scale * q
// Every supported type keeps its exact weights; columns past `n` are zero.
#pragma once
#include "common.h"
#include "thread_pool.h"

namespace fp {

enum class Packing { kNibblesHalf, kNibblesFloat, kBytesHalf, kBytesSplit };

// GGUF's numbers of the types that can be packed.
enum TensorType { kF32 = 0, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ8_0 = 8, kQ4_K = 12, kQ6_K = 14 };

size_t panel_block_bytes(Packing packing);
inline bool takes_int8(Packing packing) { return packing == Packing::kNibblesHalf || packing == Packing::kNibblesFloat; }

// Bytes of one row of `columns` elements; fails for a type that has no block geometry here or a length that it cannot hold.
size_t row_bytes(int type, int columns);

// One row as floats: for embeddings.
void dequantise_row(int type, const uint8_t* row, int columns, float* out);

class PackedMatrix {
  public:
    PackedMatrix() = default;
    // Repacks `raw`, [n, k] of `type`, on all threads of `pool`.
    PackedMatrix(ThreadPool& pool, int type, const uint8_t* raw, int n, int k);

    bool empty() const { return n_ == 0; }
    int n() const { return n_; }
    int k() const { return k_; }
    int num_panels() const { return ceil_div(n_, kPanel); }
    Packing packing() const { return packing_; }
    const uint8_t* panel(int index) const { return data_.data() + static_cast<size_t>(index) * panel_bytes_; }
    size_t num_bytes() const { return data_.size(); }

  private:
    void pack_panel(int index, int type, const uint8_t* raw);

    Packing packing_ = Packing::kNibblesHalf;
    int n_ = 0;
    int k_ = 0;
    size_t panel_bytes_ = 0;
    Buffer<uint8_t> data_;
};

}  // namespace fp
