// Products on AVX2: int8 activations by maddubs (unsigned nibble first, signed activation second), int16 ones by maddwd.
//
// 32 products of at most 15 * 127, two of them added by maddubs, stay below 2^15 when all 16 pairs of a block are summed:
// 32 * 15 * 127 / 2 = 30,480. So a whole block accumulates in int16 and is widened once.
#include "products.h"
#include "simd.h"

namespace fp {
namespace {

constexpr int kUnpackFromRows = 8;  // below, unpacking a panel for every 4 rows is cheaper than a round trip through the cache

__m256 scales_at(const uint8_t* at, int half, const uint16_t*) { return load_half(reinterpret_cast<const uint16_t*>(at) + 8 * half); }
__m256 scales_at(const uint8_t* at, int half, const float*) { return _mm256_loadu_ps(reinterpret_cast<const float*>(at) + 8 * half); }

__m256i load_bytes(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

// f += sum * (scale * d) + min * s, for one row and one half of the columns.
inline __m256 add_block(__m256i sum, __m256 scale, __m256 min, const float* d, const float* s, __m256 f) {
    const __m256 products = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
    f = _mm256_fmadd_ps(products, _mm256_mul_ps(scale, _mm256_broadcast_ss(d)), f);
    return _mm256_fmadd_ps(min, _mm256_broadcast_ss(s), f);
}

// acc[2 r], acc[2 r + 1] += the four products of `low`, `high` with row r's activations. `is_first` starts the sums instead.
template <int R>
inline void add_products(__m256i* acc, __m256i low, __m256i high, const int8_t* x, bool is_first) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const __m256i value = broadcast_bytes(x + r * kBlock);
        const __m256i a = _mm256_maddubs_epi16(low, value), b = _mm256_maddubs_epi16(high, value);
        acc[2 * r] = is_first ? a : _mm256_add_epi16(acc[2 * r], a);
        acc[2 * r + 1] = is_first ? b : _mm256_add_epi16(acc[2 * r + 1], b);
        FP_PIN(acc[2 * r]);
        FP_PIN(acc[2 * r + 1]);
    }
}

// R rows with the nibbles unpacked on the way.
template <int R, class Scale>
void packed_rows(const uint8_t* panel, const Activations& x, int row, float* out, size_t stride) {
    const __m256i mask = _mm256_set1_epi8(15);
    const int blocks = x.k / kBlock;
    const size_t at = block_index(row, 0, blocks);
    const int8_t* q = x.q8 + at * kBlock;
    const float *d = x.d8 + at, *s = x.s8 + at;
    __m256 f[2 * R];
    for (__m256& value : f) value = _mm256_setzero_ps();
    for (int b = 0; b < blocks; ++b, q += kRowGroup * kBlock, d += kRowGroup, s += kRowGroup, panel += 256 + 32 * sizeof(Scale)) {
        __m256i acc[2 * R];
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
            const __m256i w0 = load_bytes(panel + 64 * g), w1 = load_bytes(panel + 64 * g + 32);
            add_products<R>(acc, _mm256_and_si256(w0, mask), _mm256_and_si256(w1, mask), q + 8 * g, g == 0);
            add_products<R>(acc, _mm256_and_si256(_mm256_srli_epi16(w0, 4), mask),
                            _mm256_and_si256(_mm256_srli_epi16(w1, 4), mask), q + 8 * g + 4, false);
        }
        const Scale* form = nullptr;
        const uint8_t *scales = panel + 256, *mins = scales + kPanel * sizeof(Scale);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const __m256 scale = scales_at(scales, h, form), min = scales_at(mins, h, form);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) f[2 * r + h] = add_block(acc[2 * r + h], scale, min, d + r, s + r, f[2 * r + h]);
        }
    }
    for (int r = 0; r < 2 * R; ++r) _mm256_storeu_ps(out + r / 2 * stride + r % 2 * 8, f[r]);
}

// Blocks [0, count) of a panel as bytes, [count][8][64], and floats, [count][scales 16 | mins 16].
template <class Scale>
void unpack(const uint8_t* panel, int count, const ProductScratch& to) {
    const __m256i mask = _mm256_set1_epi8(15);
    const Scale* form = nullptr;
    for (int b = 0; b < count; ++b, panel += 256 + 32 * sizeof(Scale)) {
        auto* bytes = reinterpret_cast<__m256i*>(to.bytes + static_cast<size_t>(b) * kBlock * kPanel);
        for (int g = 0; g < 4; ++g) {
            const __m256i w0 = load_bytes(panel + 64 * g), w1 = load_bytes(panel + 64 * g + 32);
            bytes[4 * g] = _mm256_and_si256(w0, mask);
            bytes[4 * g + 1] = _mm256_and_si256(w1, mask);
            bytes[4 * g + 2] = _mm256_and_si256(_mm256_srli_epi16(w0, 4), mask);
            bytes[4 * g + 3] = _mm256_and_si256(_mm256_srli_epi16(w1, 4), mask);
        }
        for (int part = 0; part < 4; ++part) {
            _mm256_storeu_ps(to.floats + b * 32 + part * 8, scales_at(panel + 256 + part / 2 * kPanel * sizeof(Scale), part % 2, form));
        }
    }
}

// R rows over the unpacked blocks [begin, end); the sums go on from `out` unless begin is 0.
template <int R>
void unpacked_rows(const ProductScratch& from, const Activations& x, int row, int begin, int end, float* out, size_t stride) {
    const int blocks = x.k / kBlock;
    const size_t at = block_index(row, begin, blocks);
    const int8_t* q = x.q8 + at * kBlock;
    const float *d = x.d8 + at, *s = x.s8 + at;
    const uint8_t* bytes = from.bytes;
    const float* scales = from.floats;
    __m256 f[2 * R];
    for (int r = 0; r < 2 * R; ++r) f[r] = begin ? _mm256_loadu_ps(out + r / 2 * stride + r % 2 * 8) : _mm256_setzero_ps();
    for (int b = begin; b < end; ++b, q += kRowGroup * kBlock, d += kRowGroup, s += kRowGroup, bytes += kBlock * kPanel, scales += 2 * kPanel) {
        __m256i acc[2 * R];
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            add_products<R>(acc, load_bytes(bytes + 64 * g), load_bytes(bytes + 64 * g + 32), q + 4 * g, g == 0);
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const __m256 scale = _mm256_loadu_ps(scales + 8 * h), min = _mm256_loadu_ps(scales + kPanel + 8 * h);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) f[2 * r + h] = add_block(acc[2 * r + h], scale, min, d + r, s + r, f[2 * r + h]);
        }
    }
    for (int r = 0; r < 2 * R; ++r) _mm256_storeu_ps(out + r / 2 * stride + r % 2 * 8, f[r]);
}

template <class Scale>
void nibbles(const uint8_t* panel, const Activations& x, int count, float* out, size_t stride,
             const ProductScratch& scratch) {
    int r = 0;
    if (count < kUnpackFromRows) {
        for (; r + 4 <= count; r += 4) packed_rows<4, Scale>(panel, x, r, out + r * stride, stride);
        for (; r + 2 <= count; r += 2) packed_rows<2, Scale>(panel, x, r, out + r * stride, stride);
        for (; r < count; ++r) packed_rows<1, Scale>(panel, x, r, out + r * stride, stride);
        return;
    }
    const int blocks = x.k / kBlock;
    for (int begin = 0; begin < blocks; begin += kUnpackedBlocks) {
        const int end = begin + kUnpackedBlocks < blocks ? begin + kUnpackedBlocks : blocks;
        unpack<Scale>(panel + begin * (256 + 32 * sizeof(Scale)), end - begin, scratch);
        for (r = 0; r + 4 <= count; r += 4) unpacked_rows<4>(scratch, x, r, begin, end, out + r * stride, stride);
        for (; r < count; ++r) unpacked_rows<1>(scratch, x, r, begin, end, out + r * stride, stride);
    }
}

// R rows of int16 activations. `Split`: each half of a block has its own scale.
template <int R, bool Split>
void byte_rows(const uint8_t* panel, const Activations& x, int row, float* out, size_t stride) {
    constexpr int kParts = Split ? 2 : 1, kPairs = 16 / kParts;
    constexpr size_t kBytes = 512 + (Split ? 128 : 32);
    const int blocks = x.k / kBlock;
    const size_t at = block_index(row, 0, blocks);
    const int16_t* q = x.q16 + at * kBlock;
    const float* d = x.d16 + at;
    __m256 f[2 * R];
    for (__m256& value : f) value = _mm256_setzero_ps();
    for (int b = 0; b < blocks; ++b, q += kRowGroup * kBlock, d += kRowGroup, panel += kBytes) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            __m256i acc[2 * R];
#pragma GCC unroll 16
            for (int g = 0; g < kPairs; ++g) {
                const auto* pair = reinterpret_cast<const __m128i*>(panel + (part * kPairs + g) * 32);
                const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair)), high = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair + 1));
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const __m256i value = broadcast_bytes(q + r * kBlock + 2 * (part * kPairs + g));
                    const __m256i a = _mm256_madd_epi16(low, value), c = _mm256_madd_epi16(high, value);
                    acc[2 * r] = g ? _mm256_add_epi32(acc[2 * r], a) : a;
                    acc[2 * r + 1] = g ? _mm256_add_epi32(acc[2 * r + 1], c) : c;
                    FP_PIN(acc[2 * r]);
                    FP_PIN(acc[2 * r + 1]);
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < 2 * R; ++i) {
                const __m256 scale = Split ? scales_at(panel + 512 + 64 * part, i % 2, static_cast<const float*>(nullptr))
                                           : scales_at(panel + 512, i % 2, static_cast<const uint16_t*>(nullptr));
                const __m256 factor = _mm256_mul_ps(scale, _mm256_broadcast_ss(d + i / 2));
                f[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[i]), factor, f[i]);
            }
        }
    }
    for (int r = 0; r < 2 * R; ++r) _mm256_storeu_ps(out + r / 2 * stride + r % 2 * 8, f[r]);
}

template <bool Split>
void bytes(const uint8_t* panel, const Activations& x, int count, float* out, size_t stride, const ProductScratch&) {
    int r = 0;
    for (; r + 4 <= count; r += 4) byte_rows<4, Split>(panel, x, r, out + r * stride, stride);
    for (; r + 2 <= count; r += 2) byte_rows<2, Split>(panel, x, r, out + r * stride, stride);
    for (; r < count; ++r) byte_rows<1, Split>(panel, x, r, out + r * stride, stride);
}

}  // namespace

const ProductTable kAvx2Products = {nibbles<uint16_t>, nibbles<float>, bytes<false>, bytes<true>, false};

}  // namespace fp
