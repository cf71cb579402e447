#include "gguf_blocks.h"

#include <cstring>

#include "packed_matrix.h"
#include "simd.h"

namespace fp {
namespace {

constexpr int kSuperBlock = 256;
constexpr uint32_t kLowNibbles = 0x0f0f0f0f;

float half_at(const uint8_t* at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return half_to_float(bits);
}

uint32_t word_at(const uint8_t* at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

// 16 bytes: the low nibbles are inputs 0 .. 15, the high ones 16 .. 31.
void split_nibbles(const uint8_t* bytes, uint32_t* words) {
    for (int t = 0; t < 4; ++t) {
        const uint32_t word = word_at(bytes + 4 * t);
        words[t] = word & kLowNibbles;
        words[4 + t] = (word >> 4) & kLowNibbles;
    }
}

// The 6-bit scale and minimum of sub-block `index` (0 .. 7), packed crosswise into 12 bytes.
void six_bits(const uint8_t* packed, int index, int* scale, int* min) {
    if (index < 4) {
        *scale = packed[index] & 63;
        *min = packed[index + 4] & 63;
    } else {
        *scale = (packed[index + 4] & 15) | (packed[index - 4] >> 6) << 4;
        *min = (packed[index + 4] >> 4) | (packed[index] >> 6) << 4;
    }
}

NibbleBlock read_q4_k(const uint8_t* row, int block) {
    constexpr size_t kBytes = 144;  // d, dmin (fp16), 12 bytes of scales, 128 bytes of nibbles
    const uint8_t* super = row + block / 8 * kBytes;
    const int sub = block % 8;
    int scale, min;
    six_bits(super + 4, sub, &scale, &min);
    NibbleBlock out;
    out.scale = half_at(super) * static_cast<float>(scale);
    out.min = -half_at(super + 2) * static_cast<float>(min);
    const uint8_t* bytes = super + 16 + sub / 2 * 32;  // two sub-blocks share 32 bytes: low nibbles, high nibbles
    for (int t = 0; t < 8; ++t) out.words[t] = (word_at(bytes + 4 * t) >> (sub % 2 ? 4 : 0)) & kLowNibbles;
    return out;
}

ByteBlock read_q6_k(const uint8_t* row, int block) {
    constexpr size_t kBytes = 210;  // 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d (fp16)
    const uint8_t* super = row + block / 8 * kBytes;
    const int half = block % 8 / 4;  // 128 inputs share 64 low bytes and 32 high bytes
    const int part = block % 4;
    const uint8_t* low = super + half * 64 + part % 2 * 32;
    const uint8_t* high = super + 128 + half * 32;
    ByteBlock out;
    for (int i = 0; i < kBlock; ++i) {
        const int nibble = part < 2 ? low[i] & 15 : low[i] >> 4;
        out.q[i] = static_cast<int8_t>((nibble | (high[i] >> (2 * part) & 3) << 4) - 32);
    }
    const float d = half_at(super + 208);
    for (int s = 0; s < 2; ++s) {
        const int8_t scale = static_cast<int8_t>(super[192 + block % 8 * 2 + s]);
        out.scale[s] = d * static_cast<float>(scale);
    }
    return out;
}

ByteBlock read_q8_0(const uint8_t* row, int block) {
    const uint8_t* at = row + static_cast<size_t>(block) * 34;
    ByteBlock out;
    memcpy(out.q, at + 2, kBlock);
    out.scale[0] = out.scale[1] = half_at(at);
    return out;
}

ByteBlock read_q5_0(const uint8_t* row, int block) {
    const uint8_t* at = row + static_cast<size_t>(block) * 22;
    const uint32_t fifth = word_at(at + 2);
    ByteBlock out;
    for (int i = 0; i < kBlock; ++i) {
        const uint8_t byte = at[6 + i % 16];
        const int nibble = i < 16 ? byte & 15 : byte >> 4;
        out.q[i] = static_cast<int8_t>((nibble | (fifth >> i & 1) << 4) - 16);
    }
    out.scale[0] = out.scale[1] = half_at(at);
    return out;
}

}  // namespace

NibbleBlock read_nibbles(int type, const uint8_t* row, int block) {
    if (type == kQ4_K) return read_q4_k(row, block);
    NibbleBlock out;
    const bool has_min = type == kQ4_1;
    const uint8_t* at = row + static_cast<size_t>(block) * (has_min ? 20 : 18);
    out.scale = half_at(at);
    out.min = has_min ? half_at(at + 2) : -8.0f * out.scale;
    split_nibbles(at + (has_min ? 4 : 2), out.words);
    return out;
}

ByteBlock read_bytes(int type, const uint8_t* row, int block) {
    switch (type) {
        case kQ5_0: return read_q5_0(row, block);
        case kQ6_K: return read_q6_k(row, block);
        default: return read_q8_0(row, block);
    }
}

size_t row_bytes(int type, int columns) {
    struct Geometry { int type, elements, bytes; };
    static constexpr Geometry kGeometries[] = {{kF32, 1, 4},   {kQ4_0, 32, 18}, {kQ4_1, 32, 20}, {kQ5_0, 32, 22},
                                               {kQ8_0, 32, 34}, {kQ4_K, kSuperBlock, 144}, {kQ6_K, kSuperBlock, 210}};
    for (const Geometry& geometry : kGeometries) {
        if (geometry.type != type) continue;
        if (columns % geometry.elements) {
            fail(FP_INVALID, "a row has %d weights, not a multiple of its type's block of %d", columns, geometry.elements);
        }
        return static_cast<size_t>(columns) / geometry.elements * geometry.bytes;
    }
    fail(FP_UNSUPPORTED, "tensor type %d has no native kernel (supported: F32, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K)", type);
}

void dequantise_row(int type, const uint8_t* row, int columns, float* out) {
    if (type == kF32) {
        memcpy(out, row, static_cast<size_t>(columns) * sizeof(float));
        return;
    }
    const bool is_nibbles = type == kQ4_0 || type == kQ4_1 || type == kQ4_K;
    for (int block = 0; block < columns / kBlock; ++block, out += kBlock) {
        if (is_nibbles) {
            const NibbleBlock from = read_nibbles(type, row, block);
            for (int i = 0; i < kBlock; ++i) {
                const auto nibble = static_cast<float>(from.words[i / 4] >> (i % 4 * 8) & 15);
                out[i] = from.scale * nibble + from.min;
            }
        } else {
            const ByteBlock from = read_bytes(type, row, block);
            for (int i = 0; i < kBlock; ++i) out[i] = from.scale[i / 16] * static_cast<float>(from.q[i]);
        }
    }
}

}  // namespace fp
