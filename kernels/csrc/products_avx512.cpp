// Products on AVX-512 with VNNI: the sums of products_avx2.cpp, 16 columns in one register, the activation broadcast by the
// multiply-add itself. Integer sums are exact and the float order is the same, so the bits are too.
#include <immintrin.h>

#include "products.h"

namespace fp {
namespace {

constexpr int kRows = kRowGroup;

inline __m512 scales_at(const uint8_t* at, const uint16_t*) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline __m512 scales_at(const uint8_t* at, const float*) { return _mm512_loadu_ps(at); }

inline __m512i broadcast_word(const void* from) {
    int32_t word;
    __builtin_memcpy(&word, from, sizeof word);
    return _mm512_set1_epi32(word);
}

template <int R, class Scale>
void nibble_rows(const uint8_t* panel, const Activations& x, int row, float* out, size_t stride) {
    const __m512i mask = _mm512_set1_epi8(15);
    const Scale* form = nullptr;
    const int blocks = x.k / kBlock;
    const size_t at = block_index(row, 0, blocks);
    const int8_t* q = x.q8 + at * kBlock;
    const float *d = x.d8 + at, *s = x.s8 + at;
    __m512 f[R];
    for (__m512& value : f) value = _mm512_setzero_ps();
    for (int b = 0; b < blocks; ++b, panel += 256 + 32 * sizeof(Scale)) {
        __m512i acc[R];
        for (__m512i& value : acc) value = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
            const __m512i both = _mm512_loadu_si512(panel + 64 * g);
            const __m512i low = _mm512_and_si512(both, mask), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                acc[r] = _mm512_dpbusd_epi32(acc[r], low, broadcast_word(q + r * kBlock + 8 * g));
                acc[r] = _mm512_dpbusd_epi32(acc[r], high, broadcast_word(q + r * kBlock + 8 * g + 4));
            }
        }
        const __m512 scale = scales_at(panel + 256, form), min = scales_at(panel + 256 + kPanel * sizeof(Scale), form);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(d[r]));
            f[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r]), factor, f[r]);
            f[r] = _mm512_fmadd_ps(min, _mm512_set1_ps(s[r]), f[r]);
        }
        q += kRowGroup * kBlock;
        d += kRowGroup;
        s += kRowGroup;
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * stride, f[r]);
}

template <class Scale>
void nibbles(const uint8_t* panel, const Activations& x, int count, float* out, size_t stride, const ProductScratch&) {
    int r = 0;
    for (; r + kRows <= count; r += kRows) nibble_rows<kRows, Scale>(panel, x, r, out + r * stride, stride);
    for (; r + 4 <= count; r += 4) nibble_rows<4, Scale>(panel, x, r, out + r * stride, stride);
    for (; r + 2 <= count; r += 2) nibble_rows<2, Scale>(panel, x, r, out + r * stride, stride);
    for (; r < count; ++r) nibble_rows<1, Scale>(panel, x, r, out + r * stride, stride);
}

template <int R, bool Split>
void byte_rows(const uint8_t* panel, const Activations& x, int row, float* out, size_t stride) {
    constexpr int kParts = Split ? 2 : 1, kPairs = 16 / kParts;
    constexpr size_t kBytes = 512 + (Split ? 128 : 32);
    const int blocks = x.k / kBlock;
    const size_t at = block_index(row, 0, blocks);
    const int16_t* q = x.q16 + at * kBlock;
    const float* d = x.d16 + at;
    __m512 f[R];
    for (__m512& value : f) value = _mm512_setzero_ps();
    for (int b = 0; b < blocks; ++b, panel += kBytes) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            __m512i acc[R];
            for (__m512i& value : acc) value = _mm512_setzero_si512();
#pragma GCC unroll 16
            for (int g = 0; g < kPairs; ++g) {
                const int pair = part * kPairs + g;
                const __m512i weights = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + pair * 32)));
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) acc[r] = _mm512_dpwssd_epi32(acc[r], weights, broadcast_word(q + r * kBlock + 2 * pair));
            }
            const __m512 scale = Split ? scales_at(panel + 512 + 64 * part, static_cast<const float*>(nullptr))
                                       : scales_at(panel + 512, static_cast<const uint16_t*>(nullptr));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(d[r]));
                f[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r]), factor, f[r]);
            }
        }
        q += kRowGroup * kBlock;
        d += kRowGroup;
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * stride, f[r]);
}

template <bool Split>
void bytes(const uint8_t* panel, const Activations& x, int count, float* out, size_t stride, const ProductScratch&) {
    int r = 0;
    for (; r + kRows <= count; r += kRows) byte_rows<kRows, Split>(panel, x, r, out + r * stride, stride);
    for (; r + 4 <= count; r += 4) byte_rows<4, Split>(panel, x, r, out + r * stride, stride);
    for (; r + 2 <= count; r += 2) byte_rows<2, Split>(panel, x, r, out + r * stride, stride);
    for (; r < count; ++r) byte_rows<1, Split>(panel, x, r, out + r * stride, stride);
}

}  // namespace

const ProductTable kAvx512Products = {nibbles<uint16_t>, nibbles<float>, bytes<false>, bytes<true>, false};

}  // namespace fp
