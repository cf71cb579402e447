// Small vector functions of 8 floats. `static inline`: each file gets its own copy, compiled for its own instruction set.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <utility>

// An empty instruction that claims to change a register. It stops the compiler from hoisting broadcasts and reordering sums until
// everything spills to the stack, which halves the speed of the products.
#define FP_PIN(value) asm volatile("" : "+x"(value))

// For the lambdas of `repeat`.
#define FP_INLINE __attribute__((always_inline))

namespace fp {

template <class Body, int... I>
static inline FP_INLINE void each_of(std::integer_sequence<int, I...>, const Body& body) {
    (body(std::integral_constant<int, I>()), ...);
}

// body(0), body(1) ... body(N - 1), written out. A loop that the compiler unrolls late leaves an array of sums in memory, which
// costs half of the speed: here every index is a constant from the start, so the sums are registers.
template <int N, class Body>
static inline FP_INLINE void repeat(const Body& body) {
    each_of(std::make_integer_sequence<int, N>(), body);
}

// A sum that stays in its register (see FP_PIN). Pinning an element of an array in place would keep the array in memory.
static inline FP_INLINE __m256 pinned(__m256 value) {
    FP_PIN(value);
    return value;
}

static inline __m256 load_half(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

static inline void store_half(uint16_t* to, __m256 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

static inline float half_to_float(uint16_t value) { return _cvtsh_ss(value); }
static inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

// The same four bytes in every lane.
static inline __m256i broadcast_bytes(const void* from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return _mm256_set1_epi32(word);
}

static inline float max_of(__m256 value) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// The order of these additions is part of every result.
static inline float sum_of(__m256 value) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static inline __m256 absolute(__m256 value) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value); }

// e^x to about 2 ulp; exactly 1 at 0. Below -87 it is e^-87, above 88 e^88; NaN stays NaN.
static inline __m256 exp_of(__m256 x) {
    // max/min return their second operand when one is NaN: x comes second so that NaN passes.
    x = _mm256_max_ps(_mm256_set1_ps(-87.0f), _mm256_min_ps(_mm256_set1_ps(88.0f), x));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);  // Cephes' polynomial for e^r - 1 - r over r^2
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}

}  // namespace fp
