// Products of activation rows with one panel of weights: the interface that the instruction sets implement.
//
// Order of every sum, the same in all of them, so that a row's result has the same bits in any batch and on any machine:
// integers inside a block of 32 inputs (exact), then from the first block to the last
//   nibbles: f = fma(sum, scale * d, f); f = fma(min, s, f)     bytes: f = fma(sum, scale * d, f)
// with d the activation's scale and s its sum (of the *quantised* values: the exact sum would double the error).
#pragma once
#include "common.h"
#include "packed_matrix.h"

namespace fp {

// Quantised rows lie in groups of 8, block by block, so that one pointer and constant offsets reach all rows of a tile:
// block b of row r is at [r / 8][b][r % 8].
constexpr int kRowGroup = 8;

constexpr size_t block_index(int row, int block, int blocks) {
    return (static_cast<size_t>(row / kRowGroup) * blocks + block) * kRowGroup + row % kRowGroup;
}

// Rows of activations in the forms that products read; a form that no matrix wants is null.
struct Activations {
    int k = 0;
    const int8_t* q8 = nullptr;    // [rows / 8, k / 32, 8, 32], with d8 and s8 [rows / 8, k / 32, 8]
    const float* d8 = nullptr;
    const float* s8 = nullptr;
    const int16_t* q16 = nullptr;  // [rows / 8, k / 32, 8, 32], with d16 [rows / 8, k / 32, 8]
    const float* d16 = nullptr;
    const float* f32 = nullptr;    // [rows, k], in the check variant only
};

// Memory that a product may use while it runs; one a thread.
struct ProductScratch {
    uint8_t* bytes;  // kUnpackedBytes
    float* floats;   // kUnpackedFloats, or k * 16 in the check variant
};

constexpr int kUnpackedBlocks = 24;  // 12 KB of weights: stays in the first-level cache beside the activations
constexpr size_t kUnpackedBytes = size_t{kUnpackedBlocks} * kBlock * kPanel;
constexpr size_t kUnpackedFloats = size_t{kUnpackedBlocks} * 2 * kPanel;

// Rows [0, count) times one panel: 16 floats a row to `out`, `stride` floats apart.
using PanelProduct = void (*)(const uint8_t* panel, const Activations& x, int count, float* out, size_t stride,
                              const ProductScratch& scratch);

struct ProductTable {
    PanelProduct nibbles_half, nibbles_float, bytes_half, bytes_split;
    bool reads_floats;

    PanelProduct of(Packing packing) const {
        switch (packing) {
            case Packing::kNibblesHalf: return nibbles_half;
            case Packing::kNibblesFloat: return nibbles_float;
            case Packing::kBytesHalf: return bytes_half;
            default: return bytes_split;
        }
    }
};

extern const ProductTable kAvx2Products;
extern const ProductTable kAvx512Products;
extern const ProductTable kCheckProducts;

bool supports(int variant);
// The table of `variant`, FP_AUTO being the best that this machine has; `*chosen` is what was taken.
const ProductTable& products_for(int variant, int* chosen);

}  // namespace fp
