#include "packed_matrix.h"

#include <cstring>

#include "gguf_blocks.h"
#include "simd.h"

namespace fp {
namespace {

constexpr size_t kNibbleBytes = kPanel * kBlock / 2;
constexpr size_t kByteBytes = kPanel * kBlock;
constexpr int kPanelsPerChunk = 4;

Packing packing_of(int type) {
    switch (type) {
        case kQ4_0:
        case kQ4_1: return Packing::kNibblesHalf;
        case kQ4_K: return Packing::kNibblesFloat;  // its scales are products that fp16 would round
        case kQ5_0:
        case kQ8_0: return Packing::kBytesHalf;
        case kQ6_K: return Packing::kBytesSplit;
        default: fail(FP_UNSUPPORTED, "tensor type %d has no native product", type);
    }
}

void put_half(uint8_t* to, int index, float value) {
    const uint16_t bits = float_to_half(value);
    memcpy(to + 2 * index, &bits, sizeof bits);
}

void put_float(uint8_t* to, int index, float value) { memcpy(to + 4 * index, &value, sizeof value); }

void put_nibbles(const NibbleBlock& from, int column, bool is_float, uint8_t* to) {
    for (int g = 0; g < 4; ++g) {
        const uint32_t word = from.words[2 * g] | from.words[2 * g + 1] << 4;
        memcpy(to + g * 64 + column * 4, &word, sizeof word);
    }
    uint8_t* scales = to + kNibbleBytes;
    if (is_float) {
        put_float(scales, column, from.scale);
        put_float(scales, kPanel + column, from.min);
    } else {
        put_half(scales, column, from.scale);
        put_half(scales, kPanel + column, from.min);
    }
}

void put_bytes(const ByteBlock& from, int column, bool is_split, uint8_t* to) {
    for (int g = 0; g < 16; ++g) memcpy(to + g * 32 + column * 2, from.q + 2 * g, 2);
    uint8_t* scales = to + kByteBytes;
    if (is_split) {
        put_float(scales, column, from.scale[0]);
        put_float(scales, kPanel + column, from.scale[1]);
    } else {
        put_half(scales, column, from.scale[0]);
    }
}

}  // namespace

size_t panel_block_bytes(Packing packing) {
    switch (packing) {
        case Packing::kNibblesHalf: return kNibbleBytes + 2 * kPanel * sizeof(uint16_t);
        case Packing::kNibblesFloat: return kNibbleBytes + 2 * kPanel * sizeof(float);
        case Packing::kBytesHalf: return kByteBytes + kPanel * sizeof(uint16_t);
        case Packing::kBytesSplit: return kByteBytes + 2 * kPanel * sizeof(float);
    }
    fail(FP_INTERNAL, "unknown packing");
}

PackedMatrix::PackedMatrix(ThreadPool& pool, int type, const uint8_t* raw, int n, int k)
    : packing_(packing_of(type)), n_(n), k_(k), panel_bytes_(panel_block_bytes(packing_) * (k / kBlock)) {
    if (k % kBlock) fail(FP_UNSUPPORTED, "a matrix has %d inputs, not a multiple of %d", k, kBlock);
    data_ = Buffer<uint8_t>(panel_bytes_ * num_panels());
    pool.run(ceil_div(num_panels(), kPanelsPerChunk), [&](int chunk, int) {
        for (int i = chunk * kPanelsPerChunk; i < (chunk + 1) * kPanelsPerChunk && i < num_panels(); ++i) {
            pack_panel(i, type, raw);
        }
    });
}

void PackedMatrix::pack_panel(int index, int type, const uint8_t* raw) {
    const size_t stride = row_bytes(type, k_);
    const size_t block_bytes = panel_block_bytes(packing_);
    uint8_t* to = data_.data() + static_cast<size_t>(index) * panel_bytes_;
    const int columns = n_ - index * kPanel < kPanel ? n_ - index * kPanel : kPanel;
    for (int block = 0; block < k_ / kBlock; ++block, to += block_bytes) {
        for (int column = 0; column < columns; ++column) {
            const uint8_t* row = raw + static_cast<size_t>(index * kPanel + column) * stride;
            if (takes_int8(packing_)) {
                put_nibbles(read_nibbles(type, row, block), column, packing_ == Packing::kNibblesFloat, to);
            } else {
                put_bytes(read_bytes(type, row, block), column, packing_ == Packing::kBytesSplit, to);
            }
        }
    }
}

}  // namespace fp
