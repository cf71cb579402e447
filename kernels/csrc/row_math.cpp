#include "row_math.h"

#include <cmath>

#include "simd.h"

namespace fp {
namespace {

// Largest magnitude of 32 values; NaN if one is NaN, so that a broken row stays broken.
float largest_of_block(const __m256* values) {
    __m256 largest = absolute(values[0]), sum = values[0];
    for (int i = 1; i < 4; ++i) {
        largest = _mm256_max_ps(largest, absolute(values[i]));
        sum = _mm256_add_ps(sum, values[i]);
    }
    const int nan_lanes = _mm256_movemask_ps(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
    return nan_lanes ? NAN : max_of(largest);
}

void load_block(const float* x, __m256* values) {
    for (int i = 0; i < 4; ++i) values[i] = _mm256_loadu_ps(x + 8 * i);
}

int sum_of_bytes(__m256i q) {
    const __m256i words = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q), _mm256_set1_epi16(1));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

}  // namespace

void rms_norm(const float* x, const float* weight, int n, float epsilon, float* out) {
    __m256 squares = _mm256_setzero_ps();
    for (int i = 0; i < n; i += 8) {
        const __m256 value = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(value, value, squares);
    }
    const __m256 factor = _mm256_set1_ps(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(n) + epsilon));
    for (int i = 0; i < n; i += 8) {
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor), _mm256_loadu_ps(weight + i)));
    }
}

void quantise_int8(const float* x, int8_t* q, float* d, float* s) {
    __m256 values[4];
    load_block(x, values);
    const float largest = largest_of_block(values);
    *d = largest / 127.0f;
    const __m256 inverse = _mm256_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    __m256i words[4];
    for (int i = 0; i < 4; ++i) words[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], inverse));
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(words[0], words[1]), _mm256_packs_epi32(words[2], words[3]));
    // The packs work inside 128-bit halves: put the groups of four back in order.
    const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), ordered);
    *s = *d * static_cast<float>(sum_of_bytes(ordered));
}

void quantise_int16(const float* x, int16_t* q, float* d) {
    __m256 values[4];
    load_block(x, values);
    const float largest = largest_of_block(values);
    *d = largest / 32767.0f;
    const __m256 inverse = _mm256_set1_ps(largest > 0.0f ? 32767.0f / largest : 0.0f);
    for (int i = 0; i < 2; ++i) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(values[2 * i], inverse));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(values[2 * i + 1], inverse));
        const __m256i ordered = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q) + i, ordered);
    }
}

void rotate_interleaved(float* head, const float* cosines, const float* sines, int dim) {
    for (int i = 0; i < dim / 2; ++i) {
        const float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * cosines[i] - b * sines[i];
        head[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
}

void rotate_halves(float* head, const float* cosines, const float* sines, int dim) {
    float *first = head, *second = head + dim / 2;
    for (int i = 0; i < dim / 2; ++i) {
        const float a = first[i], b = second[i];
        first[i] = a * cosines[i] - b * sines[i];
        second[i] = b * cosines[i] + a * sines[i];
    }
}

void gated_silu(float* gate, const float* up, int n) {
    const __m256 one = _mm256_set1_ps(1.0f);
    for (int i = 0; i < n; i += 8) {
        const __m256 g = _mm256_loadu_ps(gate + i);
        const __m256 below = _mm256_add_ps(one, exp_of(_mm256_sub_ps(_mm256_setzero_ps(), g)));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(_mm256_div_ps(g, below), _mm256_loadu_ps(up + i)));
    }
}

// 0.5 g (1 + tanh(u)) = g / (1 + e^(-2 u)) with u = sqrt(2 / pi) (g + 0.044715 g^3)
void gated_gelu_tanh(float* gate, const float* up, int n) {
    const __m256 one = _mm256_set1_ps(1.0f), cubic = _mm256_set1_ps(0.044715f), factor = _mm256_set1_ps(-1.5957691216f);
    for (int i = 0; i < n; i += 8) {
        const __m256 g = _mm256_loadu_ps(gate + i);
        const __m256 inner = _mm256_mul_ps(g, _mm256_fmadd_ps(cubic, _mm256_mul_ps(g, g), one));
        const __m256 below = _mm256_add_ps(one, exp_of(_mm256_mul_ps(factor, inner)));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(_mm256_div_ps(g, below), _mm256_loadu_ps(up + i)));
    }
}

void add_to(float* x, const float* y, int n) {
    for (int i = 0; i < n; i += 8) _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
}

void scale_by(float* x, float factor, int n) {
    const __m256 by = _mm256_set1_ps(factor);
    for (int i = 0; i < n; i += 8) _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), by));
}

bool all_finite(const float* x, int n) {
    // value - value is 0 for finite values and NaN for the others.
    __m256 differences = _mm256_setzero_ps();
    for (int i = 0; i < n; i += 8) {
        const __m256 value = _mm256_loadu_ps(x + i);
        differences = _mm256_add_ps(differences, _mm256_sub_ps(value, value));
    }
    return _mm256_movemask_ps(_mm256_cmp_ps(differences, differences, _CMP_UNORD_Q)) == 0;
}

}  // namespace fp
